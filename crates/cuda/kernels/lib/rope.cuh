// RoPE of one pair, shared by every kernel that rotates.
#pragma once
#include "lib/num.cuh"

struct Angle {
  float sin, cos;
};

// The angle is one f32 product: that is the definition.
__device__ __forceinline__ Angle angle(u32 position, float frequency) {
  Angle angle;
  sincosf(mul(float(position), frequency), &angle.sin, &angle.cos);
  return angle;
}

// Rotates `(a, b)` by an angle that several heads may share.
__device__ __forceinline__ void rotate(float& a, float& b, Angle by) {
  float x = sub(mul(a, by.cos), mul(b, by.sin));
  b = add(mul(a, by.sin), mul(b, by.cos));
  a = x;
}

// Rotates `(a, b)` by `position * frequency`.
__device__ __forceinline__ void rotate(float& a, float& b, u32 position, float frequency) {
  rotate(a, b, angle(position, frequency));
}
