use carat_cpu_kernels::{
    isa::Isa,
    simd::{self, Floats, LANES, Line, Scalar, Simd, exp, gelu, tanh},
};
use carat_testkit::numbers::Random;

type Plain = <Scalar as Simd>::Floats;

/// The largest relative error of `f` over `from ..= to`, as a share of the true value or of `floor` if that is larger.
fn worst(f: fn(Plain) -> Plain, truth: fn(f64) -> f64, from: f32, to: f32, floor: f64) -> f64 {
    (0..40_000)
        .map(|i| from + (to - from) * i as f32 / 40_000.0)
        .map(|x| {
            let expected = truth(f64::from(x));
            let found = f64::from(f([x; LANES])[3]);
            (found - expected).abs() / expected.abs().max(floor)
        })
        .fold(0.0, f64::max)
}

#[test]
fn exponentials_are_accurate() {
    assert!(worst(exp, f64::exp, -87.0, 88.0, 0.0) < 2e-7);
    assert_eq!(exp([0.0; LANES]), [1.0; LANES]);
    assert!(exp([f32::NEG_INFINITY; LANES])[0] < 2e-38);
}

#[test]
fn hyperbolic_tangents_are_accurate_also_near_zero() {
    assert!(worst(tanh, f64::tanh, -20.0, 20.0, 0.0) < 3e-7);
    assert!(worst(tanh, f64::tanh, -0.01, 0.01, 1e-30) < 3e-7);
}

#[test]
fn gelu_is_accurate_in_its_tails_too() {
    let truth = |z: f64| {
        let u = 0.797_884_560_802_865_4 * z * (1.0 + 0.044715 * z * z);
        z / (1.0 + (-2.0 * u).exp())
    };
    assert!(worst(gelu, truth, -3.0, 30.0, 0.0) < 1e-6);
    assert!(worst(gelu, truth, -30.0, -3.0, 1e-6) < 4e-6);
}

#[test]
fn every_operation_has_the_bits_of_the_plain_one() {
    agree::<Scalar>();
    #[cfg(target_arch = "aarch64")]
    if Isa::Neon.available() {
        agree::<simd::Neon>();
    }
    #[cfg(target_arch = "aarch64")]
    if Isa::I8mm.available() {
        agree::<simd::I8mm>();
    }
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx2.available() {
        agree::<simd::Avx2>();
    }
    #[cfg(target_arch = "x86_64")]
    if Isa::AvxVnni.available() {
        agree::<simd::AvxVnni>();
    }
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512Vnni.available() {
        agree::<simd::Avx512>();
    }
}

/// Compares the operations of `S` that treat some numbers differently with [`Scalar`] on those.
fn agree_at_the_edges<S: Simd>() {
    let odd = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1.0,
        -2.5,
        f32::MIN_POSITIVE / 2.0,
    ];
    for a in odd {
        for b in odd {
            let same = |found: S::Floats, expected: Plain| {
                let mut lanes = [f32::NAN; LANES];
                found.store(&mut lanes);
                assert_eq!(
                    lanes.map(f32::to_bits),
                    expected.map(f32::to_bits),
                    "{a} {b}"
                );
            };
            let (va, vb) = (S::Floats::splat(a), S::Floats::splat(b));
            let (pa, pb) = (Plain::splat(a), Plain::splat(b));
            same(va.max(vb), Floats::max(pa, pb));
            same(va.min(vb), Floats::min(pa, pb));
            same(va.select_below(vb, va, vb), pa.select_below(pb, pa, pb));
        }
    }
    // Past the largest F16, ties at both ends, and below the normal ones.
    for x in [
        65519.0, 65520.0, 1e9, 2049.0, 2051.0, 6.1e-5, 3e-8, 2.9e-8, 8.9e-8, 1e-30,
    ] {
        let (mut found, mut expected, mut back) = ([0; LANES], [0; LANES], [0.0; LANES]);
        S::Floats::splat(x).store_f16_bits(&mut found);
        Plain::splat(x).store_f16_bits(&mut expected);
        assert_eq!(found, expected, "{x}");
        S::Floats::load_f16_bits(&found).store(&mut back);
        assert_eq!(back, Plain::load_f16_bits(&found), "{x}");
    }
}

/// Compares each operation of `S` with [`Scalar`] on random input.
fn agree<S: Simd>() {
    agree_at_the_edges::<S>();
    agree_when_transposed::<S>();
    let mut random = Random::new(1);
    for _ in 0..200 {
        let a: [f32; LANES] = std::array::from_fn(|_| 3.0 * random.normal());
        let b: [f32; LANES] = std::array::from_fn(|_| random.normal());
        let (va, vb) = (S::Floats::load(&a), S::Floats::load(&b));
        let same = |found: S::Floats, expected: [f32; LANES]| {
            let mut lanes = [f32::NAN; LANES];
            found.store(&mut lanes);
            assert_eq!(lanes.map(f32::to_bits), expected.map(f32::to_bits));
        };
        same(va.max(vb), Floats::max(a, b));
        same(va.min(vb), Floats::min(a, b));
        same(va.abs(), Floats::abs(a));
        same(va.round(), Floats::round(a));
        same(va.mul_add(vb, va), Floats::mul_add(a, b, a));
        same(va.neg_mul_add(vb, va), Floats::neg_mul_add(a, b, a));
        same(va.select_below(vb, va, vb), a.select_below(b, a, b));
        same(exp(va), exp(a));
        same(tanh(va), tanh(a));
        same(gelu(va), gelu(a));
        assert_eq!(va.sum().to_bits(), Floats::sum(a).to_bits());
        assert_eq!(va.largest(), a.largest());
        let (mut f16, mut expected) = ([0; LANES], [0; LANES]);
        va.store_f16_bits(&mut f16);
        a.store_f16_bits(&mut expected);
        assert_eq!(f16, expected);

        let bytes: [u8; 64] = std::array::from_fn(|_| random.bits() as u8);
        let (sixteens, _) = bytes.as_chunks();
        same(
            S::Floats::load_i8_bytes(&sixteens[0]),
            Plain::load_i8_bytes(&sixteens[0]),
        );
        let f16s: [u8; 15 * 34 + 2] = std::array::from_fn(|i| {
            // No exponent of ones: infinities and NaNs are compared elsewhere.
            random.bits() as u8 & if i % 2 == 1 { 0xbf } else { 0xff }
        });
        same(
            S::load_f16_strided::<18>(&f16s[..272]),
            Scalar::load_f16_strided::<18>(&f16s),
        );
        same(
            S::load_f16_strided::<20>(&f16s[..302]),
            Scalar::load_f16_strided::<20>(&f16s),
        );
        same(
            S::load_f16_strided::<22>(&f16s[..332]),
            Scalar::load_f16_strided::<22>(&f16s),
        );
        same(
            S::load_f16_strided::<24>(&f16s[..362]),
            Scalar::load_f16_strided::<24>(&f16s),
        );
        same(
            S::load_f16_strided::<34>(&f16s),
            Scalar::load_f16_strided::<34>(&f16s),
        );
        let x: [i8; 64] = std::array::from_fn(|_| (random.below(255) as i32 - 127) as i8);
        let ints: [i32; LANES] = std::array::from_fn(|_| random.below(1000) as i32 - 500);
        let stored = |x: S::Ints| {
            let mut lanes = [0; LANES];
            S::store_ints(x, &mut lanes);
            lanes
        };
        let (codes, vx, vi) = (
            S::load_bytes(&bytes),
            S::load_signed(&x),
            S::load_ints(&ints),
        );
        let xu = x.map(i8::cast_unsigned);
        let sums =
            std::array::from_fn(|lane| x[4 * lane..][..4].iter().map(|&x| i32::from(x)).sum());
        let shifted = S::minus_times(
            S::dot_prepared(vi, S::prepare(codes), vx),
            S::SIGNED_OFFSET,
            S::load_ints(&sums),
        );
        assert_eq!(stored(shifted), Scalar::dot_prepared(ints, bytes, xu));
        let low = S::field(codes, 2, 63);
        let plain = Scalar::field(bytes, 2, 63);
        assert_eq!(
            stored(S::dot_unsigned(vi, low, vx)),
            Scalar::dot_unsigned(ints, plain, xu)
        );
    }
}

/// Compares the operations of `S` that transpose, and what is multiplied in that order, with [`Scalar`].
fn agree_when_transposed<S: Simd>() {
    let mut random = Random::new(2);
    for _ in 0..200 {
        let mut rows = [Line([0; 64]); LANES];
        for row in &mut rows {
            row.0.fill_with(|| random.bits() as u8);
        }
        let mut found = [Line([0; 64]); LANES];
        let mut expected = found;
        S::transpose(&rows, &mut found);
        Scalar::transpose(&rows, &mut expected);
        assert!(found.iter().zip(&expected).all(|(a, b)| a.0 == b.0));
        S::transpose_by_eights(&rows, &mut found);
        Scalar::transpose_by_eights(&rows, &mut expected);
        assert!(found.iter().zip(&expected).all(|(a, b)| a.0 == b.0));

        let stride = 16 + random.below(9);
        let apart: Vec<u8> = (0..15 * stride + 16).map(|_| random.bits() as u8).collect();
        for (found, expected) in S::transpose_strided(&apart, stride)
            .into_iter()
            .zip(Scalar::transpose_strided(&apart, stride))
        {
            let mut bytes = [0; 64];
            S::store_bytes(found, &mut bytes);
            assert_eq!(bytes, expected, "{stride}");
        }

        // Groups of 16 and of 32 columns, even and odd numbers of rows.
        let x: [i8; 64] = std::array::from_fn(|_| (random.below(255) as i32 - 127) as i8);
        let (x, _) = x.as_chunks();
        same_totals::<S, 1>(&rows[..8], [&x[..2]]);
        same_totals::<S, 2>(&rows[..4], [&x[..1], &x[1..2]]);
        same_totals::<S, 3>(&rows[4..8], [&x[..1], &x[1..2], &x[2..3]]);
        same_totals::<S, 4>(&rows[8..], [&x[..2], &x[1..3], &x[2..], &x[..2]]);
    }
}

fn same_totals<S: Simd, const R: usize>(codes: &[Line], x: [&[[i8; 16]]; R]) {
    let found = S::totals_by_eights(codes, x).map(|totals| {
        let mut lanes = [0; LANES];
        S::store_ints(totals, &mut lanes);
        lanes
    });
    assert_eq!(found, Scalar::totals_by_eights(codes, x));
}

/// Tile registers, which one architecture has.
#[cfg(target_arch = "x86_64")]
mod tiles {
    use carat_cpu_kernels::{
        isa::Isa,
        matrix::MatrixMut,
        simd::{
            Accumulate, Avx512, Floats, IN_FLIGHT, LANES, Line, Simd, Tile, Tiles, Totals,
            amx::AmxTiles,
        },
    };
    use carat_testkit::numbers::Random;

    use crate::plain_tiles::PlainTiles;

    /// Tiles of numbers of all sizes: ordinary ones, tiny and huge ones, zeros, and some too small to be normal.
    fn wild_tiles(random: &mut Random) -> [Tile; 2] {
        let mut tiles = [Tile::ZERO; 2];
        for tile in &mut tiles {
            for line in &mut tile.0 {
                for value in line.0.as_chunks_mut().0 {
                    let exponent = match random.below(8) {
                        0 => 0,
                        1 => 1 + random.below(3),
                        2 => 60 + random.below(130),
                        _ => 120 + random.below(12),
                    };
                    let sign_and_fraction = random.bits() as u16 & 0x807f;
                    *value = ((exponent as u16) << 7 | sign_and_fraction).to_le_bytes();
                }
            }
        }
        tiles
    }

    fn tile_sums<T: Tiles>(left: &[Tile; 2], right: &[Tile; 2], sums: &mut [f32]) {
        let mut tiles = T::take();
        let ([a, b], [c, d]) = (left, right);
        let parts = |a: &Tile, b: &Tile| [*a, *b];
        // Two by two with one step, then two steps, then two parts a step.
        let mut block = MatrixMut::new(sums, 2 * LANES);
        tiles.multiply::<2, 2>(
            [std::slice::from_ref(a), std::slice::from_ref(b)],
            [std::slice::from_ref(c), std::slice::from_ref(d)],
            Accumulate::OntoOutput,
            &mut block,
        );
        tiles.multiply::<1, 2>(
            [&parts(a, b)],
            [&parts(c, d), &parts(d, c)],
            Accumulate::OntoOutput,
            &mut block.part(0..LANES, 0..2 * LANES),
        );
        tiles.multiply::<2, 1>(
            [&parts(a, b), &parts(b, a)],
            [std::slice::from_ref(d)],
            Accumulate::OntoOutput,
            &mut block.part(0..2 * LANES, LANES..2 * LANES),
        );
        tiles.multiply::<1, 1>(
            [std::slice::from_ref(a)],
            [std::slice::from_ref(c)],
            Accumulate::FromZero,
            &mut block.part(LANES..2 * LANES, 0..LANES),
        );
    }

    #[test]
    fn tile_instructions_have_the_bits_of_the_plain_ones() {
        if !Isa::Amx.available() {
            return;
        }
        let mut random = Random::new(9);
        for _ in 0..50 {
            let (left, right) = (wild_tiles(&mut random), wild_tiles(&mut random));
            let initial: Vec<f32> = (0..4 * LANES * LANES)
                .map(|i| random.normal() * if i % 7 == 0 { 1e-38 } else { 10.0 })
                .collect();
            let (mut found, mut expected) = (initial.clone(), initial);
            tile_sums::<AmxTiles>(&left, &right, &mut found);
            tile_sums::<PlainTiles>(&left, &right, &mut expected);
            let bits = |x: f32| if x.is_nan() { 0 } else { x.to_bits() };
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(bits(*found), bits(*expected), "{i}: {found} {expected}");
            }

            let mut values = [[0.0; LANES]; 2];
            for x in values.iter_mut().flatten() {
                *x = f32::from_bits(random.bits() as u32);
            }
            let (mut found, mut expected) = (Line([0; 64]), Line([0; 64]));
            let [low, high] = values;
            AmxTiles::to_bf16(Floats::load(&low), Floats::load(&high), &mut found);
            PlainTiles::to_bf16(low, high, &mut expected);
            assert_eq!(found.0, expected.0, "{values:?}");
            for pair in 0..2 {
                let mut lanes = [[0.0; LANES]; 2];
                for (lanes, x) in lanes.iter_mut().zip(AmxTiles::widen_pair(&found, pair)) {
                    x.store(lanes);
                }
                assert_eq!(lanes, PlainTiles::widen_pair(&found, pair));
            }
        }
    }

    #[test]
    fn int8_tile_instructions_agree_with_the_plain_ones() {
        if !Isa::Amx.available() {
            return;
        }
        let mut random = Random::new(10);
        for _ in 0..20 {
            let mut tiles = [[Tile::ZERO; 3]; 2];
            for line in tiles.iter_mut().flatten().flat_map(|tile| &mut tile.0) {
                line.0 = std::array::from_fn(|_| random.bits() as u8);
            }
            let [left, right] = &tiles;
            let (mut fast, mut plain) = (AmxTiles::take(), PlainTiles::take());
            for slot in 0..IN_FLIGHT {
                let steps = 1 + slot % 3;
                fast.start_int8(slot, &left[..steps], &right[..steps]);
                plain.start_int8(slot, &left[..steps], &right[..steps]);
            }
            for slot in 0..IN_FLIGHT {
                let (mut found, mut expected) = (Totals::ZERO, Totals::ZERO);
                fast.finish_int8(slot, &mut found);
                plain.finish_int8(slot, &mut expected);
                assert_eq!(found.0, expected.0, "{slot}");
            }

            let blocks = std::array::from_fn(|_| random.bits() as u8);
            let codes = AmxTiles::q4_0_codes(&blocks);
            for (codes, expected) in codes.into_iter().zip(PlainTiles::q4_0_codes(&blocks)) {
                let mut found = [0; 64];
                Avx512::store_bytes(codes, &mut found);
                assert_eq!(found, expected);
            }

            let numbers: [f32; LANES] = std::array::from_fn(|_| random.normal());
            assert_repeats::<1>(&numbers);
            assert_repeats::<2>(&numbers);
            assert_repeats::<4>(&numbers);
            assert_repeats::<8>(&numbers);
            assert_repeats::<16>(&numbers);
        }
    }

    fn assert_repeats<const N: usize>(numbers: &[f32; LANES]) {
        let numbers = numbers.first_chunk::<N>().expect("no more than there are");
        let mut found = [f32::NAN; LANES];
        AmxTiles::repeat(numbers).store(&mut found);
        assert_eq!(found, PlainTiles::repeat(numbers));
    }
}
