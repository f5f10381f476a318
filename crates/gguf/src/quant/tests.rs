//! Every format against values made by another implementation, and the random blocks against their promise.

use super::*;

/// Blocks of every format and what they stand for; `testdata/make.py` says how it was made.
const BLOCKS: &[u8] = include_bytes!("testdata/blocks.bin");

fn take<'a>(rest: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, tail) = rest.split_at(count);
    *rest = tail;
    taken
}

fn take_u32(rest: &mut &[u8]) -> u32 {
    u32::from_le_bytes(take(rest, 4).try_into().unwrap())
}

fn dequantized(quant: QuantType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / quant.block_bytes() * quant.block_len()];
    quant.dequantize(bytes, &mut values);
    values
}

#[test]
fn every_format_agrees_with_the_gguf_package_bit_for_bit() {
    let mut rest = BLOCKS;
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let quant = QuantType::from_id(take_u32(&mut rest)).unwrap();
        let byte_count = take_u32(&mut rest) as usize;
        let value_count = take_u32(&mut rest) as usize;
        let values = dequantized(quant, take(&mut rest, byte_count));
        assert_eq!(values.len(), value_count, "{quant}");
        let expected = take(&mut rest, 4 * value_count).as_chunks().0;
        for (i, (value, expected)) in values.iter().zip(expected).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert_eq!(
                value.to_bits(),
                expected.to_bits(),
                "{quant} value {i}: {value} instead of {expected}"
            );
        }
        seen.push(quant);
    }
    assert_eq!(seen, QuantType::all().collect::<Vec<_>>());
}

/// One F16 scale of 1 for the whole block.
fn put_one(quant: QuantType, block: &mut [u8]) {
    if quant == QuantType::IQ1_M {
        for (k, nibble) in [0x00, 0x00, 0xc0, 0x30].into_iter().enumerate() {
            block[49 + 2 * k] = block[49 + 2 * k] & 15 | nibble;
        }
    } else {
        block[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
    }
}

/// 32,768 draws of the largest grid's 2,048 numbers leave out none.
#[test]
fn every_vector_of_a_grid_is_the_gguf_packages() {
    for line in include_str!("testdata/grids.txt").lines() {
        let (name, expected) = line.split_once(' ').unwrap();
        let quant = QuantType::all().find(|q| q.name() == name).unwrap();
        let mut bytes = vec![0; 1024 * quant.block_bytes()];
        SplitMix64::new(0).fill(&mut bytes);
        for block in bytes.chunks_exact_mut(quant.block_bytes()) {
            put_one(quant, block);
        }
        let mut total = 0u64;
        for (i, value) in (0u64..).zip(dequantized(quant, &bytes)) {
            total = total.wrapping_add(u64::from(value.to_bits()).wrapping_mul(2 * i + 1));
        }
        assert_eq!(format!("{total:016x}"), expected, "{quant}");
    }
}

#[test]
fn table_is_in_the_order_of_the_enum_with_distinct_ids_and_names() {
    for (i, quant) in QuantType::all().enumerate() {
        assert_eq!(quant as usize, i);
        assert_eq!(QuantType::from_id(quant.id()), Some(quant));
        assert_eq!(format!("{quant:?}"), quant.name());
        assert_eq!(foreign_name(quant.id()), None);
        assert_eq!(
            quant.row_bytes(3 * quant.block_len()),
            3 * quant.block_bytes()
        );
    }
}

#[test]
fn mxfp4_scale_is_half_of_the_e8m0_power_at_both_ends() {
    assert_eq!(mxfp4_scale(0).to_bits(), 1 << 21, "2^-128");
    assert_eq!(mxfp4_scale(1).to_bits(), 1 << 22, "2^-127");
    assert_eq!(mxfp4_scale(2), f32::MIN_POSITIVE);
    assert_eq!(mxfp4_scale(128), 1.0);
    assert_eq!(mxfp4_scale(255), 127f32.exp2());
}

#[test]
#[should_panic(expected = "part of a Q4_0 block")]
fn dequantizing_part_of_a_block_panics() {
    QuantType::Q4_0.dequantize(&[0; 19], &mut [0.0; 32]);
}

#[test]
#[should_panic(expected = "blocks of Q4_0")]
fn dequantizing_into_too_few_values_panics() {
    QuantType::Q4_0.dequantize(&[0; 36], &mut [0.0; 32]);
}

#[test]
fn random_blocks_have_the_asked_size_and_no_bias() {
    for quant in QuantType::all() {
        for std in [0.005, 0.06, 1.0] {
            let blocks = 65536 / quant.block_len();
            let mut bytes = vec![0; blocks * quant.block_bytes()];
            random_blocks(quant, 7, std, &mut bytes);
            let values = dequantized(quant, &bytes);
            let count = values.len() as f32;
            let mean = values.iter().sum::<f32>() / count;
            let rms = (values.iter().map(|v| v * v).sum::<f32>() / count).sqrt();
            assert!(
                (rms / std - 1.0).abs() < 0.05,
                "{quant}: rms {rms} instead of {std}"
            );
            assert!(mean.abs() < 0.03 * std, "{quant}: mean {mean} of {std}");
            let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(largest < 16.0 * std, "{quant}: {largest} of {std}");
        }
    }
}

#[test]
fn random_blocks_differ_by_seed_and_repeat_for_the_same() {
    for quant in QuantType::all() {
        let draw = |seed| {
            let mut bytes = vec![0; 8 * quant.block_bytes()];
            random_blocks(quant, seed, 0.1, &mut bytes);
            bytes
        };
        assert_eq!(draw(1), draw(1), "{quant}");
        assert_ne!(draw(1), draw(2), "{quant}");
    }
}

#[test]
fn random_blocks_of_one_tensor_have_different_scales() {
    let mut bytes = vec![0; 64 * 18];
    random_blocks(QuantType::Q4_0, 3, 0.1, &mut bytes);
    let mut scales: Vec<_> = bytes.chunks_exact(18).map(|b| [b[0], b[1]]).collect();
    scales.sort_unstable();
    scales.dedup();
    assert!(scales.len() > 16, "{} scales", scales.len());
}

#[test]
fn splitmix64_gives_the_published_sequence() {
    let mut rng = SplitMix64::new(1234567);
    let drawn: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
    assert_eq!(
        drawn,
        [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423
        ]
    );
}
