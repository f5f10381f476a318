//! When blocks end whole, and that every card has room.

use super::*;
use crate::kernel::fragment::FragmentFormat;

/// Where gate and up write what down reads as prepared rows, on a Hopper card and on one without clusters.
#[test]
fn large_networks_end_in_whole_blocks_and_small_ones_need_not() {
    let clusters = Some(ClusterCapacity::assumed(HOPPER_MULTIPROCESSORS));
    for (clusters, columns, inner, expected) in [
        (clusters, 3840, 15360, true),
        (None, 3840, 15360, true),
        (clusters, 2560, 10240, false),
        (clusters, 2816, 2112, false),
    ] {
        let whole = |rows: usize| {
            let shape = GemvShape {
                weights: GemvWeights::Fragments(FragmentFormat::Q4),
                columns,
                outputs: inner,
                pair: true,
                top_k: None,
                ready: rows > 2,
                card: GemvDevice {
                    multiprocessors: HOPPER_MULTIPROCESSORS,
                    shared_bytes: 227 << 10,
                    clusters,
                    ring: USUAL_STAGES,
                },
            };
            shape.ends_in_blocks(rows)
        };
        let all = [1, 2, 4, 8].into_iter().all(whole);
        assert_eq!(all, expected, "{columns} to {inner}");
    }
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
                        top_k,
                        ready,
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
                    shortened += usize::from(usual.ring() != USUAL_STAGES);
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
