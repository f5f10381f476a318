//! When blocks end whole, and that every card has room.

use super::*;
use crate::kernel::fragment::FragmentFormat;

fn hopper() -> GemvDevice {
    GemvDevice {
        multiprocessors: HOPPER_MULTIPROCESSORS,
        shared_bytes: 227 << 10,
        clusters: Some(ClusterCapacity::assumed(HOPPER_MULTIPROCESSORS)),
        ring: USUAL_STAGES,
    }
}

fn gate_and_up(format: FragmentFormat, columns: usize, inner: usize) -> GemvShape {
    GemvShape {
        weights: GemvWeights::Fragments(format),
        columns,
        outputs: inner,
        pair: true,
        codes: false,
        top_k: None,
        ready: false,
        normed: true,
        card: hopper(),
    }
}

/// Gate and up can write what down reads as prepared rows, on a Hopper card and on one without clusters, in blocks of as many M-tiles as
/// that takes; some networks have such blocks anyway.
#[test]
fn networks_end_in_whole_blocks_where_they_are_to() {
    for (clusters, columns, inner, by_chance) in [
        (hopper().clusters, 3840, 15360, true),
        (None, 3840, 15360, true),
        (hopper().clusters, 2560, 10240, false),
        (None, 2560, 10240, false),
        (hopper().clusters, 5376, 21504, false),
    ] {
        for codes in [false, true] {
            let whole = |rows: usize| {
                let shape = gate_and_up(FragmentFormat::Q4, columns, inner);
                let card = GemvDevice {
                    clusters,
                    ..shape.card
                };
                GemvShape {
                    codes,
                    ready: rows > 2,
                    card,
                    ..shape
                }
                .ends_in_blocks(rows)
            };
            let all = [1, 2, 4, 8].into_iter().all(whole);
            assert_eq!(all, codes || by_chance, "{columns} to {inner}");
        }
    }
}

/// Blocks of one row alone have all M-tiles between them, none has two granules more than another, and no multiprocessor is left without.
#[test]
fn blocks_of_one_row_alone_share_evenly() {
    for (columns, inner) in [(2560, 10240), (3840, 15360), (1536, 6144), (1536, 2048)] {
        for (codes, pair) in [(false, true), (true, true), (false, false)] {
            let shape = gate_and_up(FragmentFormat::Q8, columns, inner);
            let shape = GemvShape {
                pair,
                codes,
                ..shape
            };
            assert!(shape.alone());
            assert_eq!(shape.ring(1), ALONE_STAGES);
            let blocks = shape.blocks(1).unwrap();
            let granules = shape.m_tiles() / shape.granule();
            assert_eq!(blocks, granules.min(HOPPER_MULTIPROCESSORS));
            let shares = shape.shares(blocks) as usize;
            let (full, fewer) = (shares & 0xffff, shares >> 16);
            assert_eq!(fewer, shape.granule());
            let all = blocks * shape.a_block(blocks) - (blocks - full) * fewer;
            assert_eq!(all, shape.m_tiles(), "{columns} to {inner}");
        }
    }
    // Formats that take more warps, and more rows, share multiprocessors.
    assert!(!gate_and_up(FragmentFormat::Q4, 2560, 10240).alone());
    assert_eq!(
        gate_and_up(FragmentFormat::Q8, 2560, 10240).ring(2),
        USUAL_STAGES
    );
}

/// Products of published models have blocks on the smallest cards, whose rings are shorter where they must be; a ring that is chosen leaves
/// no row without its place.
#[test]
fn every_card_has_room_for_a_ring_and_a_row() {
    let mut shortened = 0;
    for (shared_bytes, multiprocessors) in [(99 << 10, 128), (227 << 10, 132)] {
        for format in FragmentFormat::ALL {
            for (columns, outputs) in [
                (1536, 6144),
                (2560, 10240),
                (10240, 2560),
                (3840, 15360),
                (15360, 3840),
                (5376, 21504),
                (21504, 5376),
            ] {
                for (pair, top_k, ready) in [
                    (false, None, false),
                    (true, None, true),
                    (false, None, true),
                    (true, Some(8), false),
                ] {
                    let shape = |ring: usize| GemvShape {
                        weights: GemvWeights::Fragments(format),
                        columns,
                        outputs,
                        pair,
                        codes: false,
                        top_k,
                        ready,
                        normed: true,
                        card: GemvDevice {
                            multiprocessors,
                            shared_bytes,
                            clusters: None,
                            ring,
                        },
                    };
                    // Experts are narrower than networks.
                    if top_k.is_some() && columns > 4096 {
                        continue;
                    }
                    let usual = shape(USUAL_STAGES);
                    shortened += usize::from(usual.ring(MAX_ROWS) != USUAL_STAGES);
                    for ring in [2, USUAL_STAGES, 4] {
                        let shape = shape(ring);
                        for rows in [1, 8] {
                            let case =
                                format!("{format:?} {outputs}x{columns}, ring {ring}, {rows} rows");
                            if top_k.is_some() {
                                assert!(shape.blocks(rows).is_some(), "{case}");
                                continue;
                            }
                            let grid = shape.grid(rows);
                            assert!(grid.shared_bytes <= shared_bytes, "{case}");
                            assert!(grid.blocks.1 <= usual.grid(rows).blocks.1, "{case}");
                        }
                    }
                }
            }
        }
    }
    assert!(shortened > 0, "none was too long");
}
