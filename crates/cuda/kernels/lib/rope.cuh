// The turn of one pair, shared by every kernel that turns.
#pragma once
#include "lib/num.cuh"

// The angle is one f32 product: that is the definition.
__device__ __forceinline__ void turn_angle(u32 position, float frequency, float& sin, float& cos) {
  sincosf(mul(float(position), frequency), &sin, &cos);
}

__device__ __forceinline__ void turn_by(float& a, float& b, float sin, float cos) {
  float x = sub(mul(a, cos), mul(b, sin));
  b = add(mul(a, sin), mul(b, cos));
  a = x;
}

// Turns `(a, b)` by `position * frequency`.
__device__ __forceinline__ void turn(float& a, float& b, u32 position, float frequency) {
  float sin, cos;
  turn_angle(position, frequency, sin, cos);
  turn_by(a, b, sin, cos);
}
