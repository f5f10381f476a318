// The weight format of a specialization: `weight_value(row, i)` is value `i` of a packed row, exactly as `carat-gguf` defines
// it. FORMAT is the format's name in lower case.
//
// A warp that reads 32 neighbouring values touches one block (or sub-block) at a time: codes are coalesced, scales are
// broadcast. Faster kernels decode whole blocks; this is the definition they are compared with.
#pragma once
#include "lib/block_float.cuh"
#include "lib/block_iq1.cuh"
#include "lib/block_iq2.cuh"
#include "lib/block_iq3.cuh"
#include "lib/block_iq4.cuh"
#include "lib/block_legacy.cuh"
#include "lib/block_mxfp4.cuh"
#include "lib/block_nvfp4.cuh"
#include "lib/block_q2_k.cuh"
#include "lib/block_q3_k.cuh"
#include "lib/block_q4_k.cuh"
#include "lib/block_q5_k.cuh"
#include "lib/block_q6_k.cuh"
#include "lib/block_ternary.cuh"

#define weight_value JOIN(FORMAT, _value)
// The block that holds value `i` of a row, and the centred code of a value of a block: formats that have fragments.
#define weight_block JOIN(FORMAT, _block)
#define weight_code JOIN(FORMAT, _code)
// Of formats that have a code table: a group's sub-scale as a byte, the bits of the block's f16 scale.
#define weight_sub_scale JOIN(FORMAT, _sub_scale)
#define weight_d JOIN(FORMAT, _d)
