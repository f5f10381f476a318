// The turn of one pair, shared by every kernel that turns.
#pragma once
#include "lib/num.cuh"

// Turns `(a, b)` by `position * frequency`. The angle is one f32 product: that is the definition.
__device__ __forceinline__ void turn(float& a, float& b, u32 position, float frequency) {
  float sin, cos;
  sincosf(mul(float(position), frequency), &sin, &cos);
  float x = sub(mul(a, cos), mul(b, sin));
  b = add(mul(a, sin), mul(b, cos));
  a = x;
}
