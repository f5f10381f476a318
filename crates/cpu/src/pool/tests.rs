use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    Grid, Pool,
    cores::{allowed_cores, pin_to},
};

fn pool() -> Pool {
    Pool::new(4).unwrap()
}

/// Computes for nothing.
fn spend(rounds: u64) {
    std::hint::black_box((0..rounds).fold(0, |a, b| std::hint::black_box(a ^ b)));
}

#[test]
fn every_item_runs_once() {
    let pool = pool();
    for items in [0, 1, 2, 3, 100, 1000] {
        let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
        pool.for_each_with(&mut [(); 4], items, |(), item| {
            counts[item].fetch_add(1, Ordering::Relaxed);
        });
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
    }
}

#[test]
fn many_small_steps_in_a_row_lose_nothing() {
    let pool = pool();
    let mut data = vec![0u64; 64];
    for _ in 0..20_000 {
        pool.for_each_chunk(&mut data, 8, |_, chunk| {
            for x in chunk {
                *x += 1;
            }
        });
    }
    assert!(data.iter().all(|&x| x == 20_000));
}

#[test]
fn parked_workers_wake() {
    let pool = pool();
    for _ in 0..5 {
        // Long enough for workers to fall asleep: the caller computes alone.
        spend(20_000_000);
        let mut data = vec![0u32; 1000];
        pool.for_each_chunk(&mut data, 10, |item, chunk| chunk.fill(item as u32));
        assert!(data.iter().enumerate().all(|(i, &x)| x as usize == i / 10));
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let pool = pool();
    for bad in [0, 7, 99] {
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each_with(&mut [(); 4], 100, |(), item| assert_ne!(item, bad));
        }));
        assert!(result.is_err());
    }
    let mut data = vec![0; 100];
    pool.for_each_chunk(&mut data, 1, |item, chunk| chunk[0] = item);
    assert!(data.iter().enumerate().all(|(i, &x)| x == i));
}

#[test]
fn tiles_cover_a_matrix_exactly() {
    let pool = pool();
    let (rows, columns) = (11, 37);
    let mut data = vec![0.0; rows * columns];
    let grid = Grid {
        data: &mut data,
        columns,
        row_bounds: &[0, 3, 3, 11],
        tile_columns: 8,
        interleave: 1,
    };
    pool.for_each_tile(vec![grid], &mut [(); 4], |(), _, mut tile| {
        for row in tile.rows.clone() {
            let row_group = tile.row_group as f32;
            tile.row_mut(row)
                .iter_mut()
                .for_each(|x| *x += 1.0 + row_group);
        }
    });
    for (i, x) in data.iter().enumerate() {
        let row_group = if i / columns < 3 { 0.0 } else { 2.0 };
        assert_eq!(*x, 1.0 + row_group);
    }
}

#[test]
fn tiles_of_several_matrices_go_in_one_round() {
    let pool = pool();
    let mut all = [vec![0.0; 6 * 10], vec![0.0; 0], vec![0.0; 6 * 3]];
    let columns = [10, 5, 3];
    let grids = all.iter_mut().zip(columns).map(|(data, columns)| Grid {
        row_bounds: if data.is_empty() { &[] } else { &[0, 6] },
        data,
        columns,
        tile_columns: 4,
        interleave: 1,
    });
    pool.for_each_tile(grids.collect(), &mut [(); 4], |(), index, mut tile| {
        for row in tile.rows.clone() {
            let value = 1.0 + index as f32;
            tile.row_mut(row).iter_mut().for_each(|x| *x += value);
        }
    });
    for (index, data) in all.iter().enumerate() {
        assert!(data.iter().all(|&x| x == 1.0 + index as f32));
    }
}

#[test]
fn interleaved_tiles_put_values_where_they_belong() {
    let pool = pool();
    let (rows, columns, interleave) = (3, 40, 4);
    let mut data = vec![0.0; rows * columns];
    let grid = Grid {
        data: &mut data,
        columns,
        row_bounds: &[0, 1, 3],
        tile_columns: 12,
        interleave,
    };
    pool.for_each_tile(vec![grid], &mut [(); 4], |(), _, mut tile| {
        let columns = tile.columns.clone();
        for row in tile.rows.clone() {
            let values: Vec<f32> = columns.clone().map(|i| (100 * row + i) as f32).collect();
            tile.store::<4>(row, &values);
        }
    });
    for (i, x) in data.iter().enumerate() {
        let (row, column) = (i / columns, i % columns);
        let (part, index) = (column / 10, column % 10);
        assert_eq!(*x, (100 * row + interleave * index + part) as f32);
    }
}

#[test]
fn pairs_of_chunks_belong_together() {
    let pool = pool();
    let (mut long, mut short) = (vec![0; 22], vec![0; 6]);
    pool.for_each_pair_of_chunks((&mut long, 8), (&mut short, 2), |item, long, short| {
        long.fill(item);
        short.fill(10 * item);
    });
    assert!(long.iter().enumerate().all(|(i, &x)| x == i / 8));
    assert_eq!(short, [0, 0, 10, 10, 20, 20]);
}

#[test]
fn chosen_chunks_are_the_only_ones_written() {
    let pool = pool();
    let mut data = vec![9usize; 50];
    pool.for_each_chosen_chunk(&mut data, 5, &[1, 4, 9], |index, chunk| chunk.fill(index));
    for (i, &x) in data.iter().enumerate() {
        assert_eq!(
            x,
            match i / 5 {
                1 => 0,
                4 => 1,
                9 => 2,
                _ => 9,
            }
        );
    }
}

/// As on a processor with fast and slow cores, or one that others use, too.
#[test]
fn a_slow_thread_leaves_its_items_to_the_others() {
    let pool = Pool::new(2).unwrap();
    let mut done = [0; 2];
    let slow = Mutex::new(None);
    for _ in 0..3 {
        pool.for_each_with(&mut done, 100, |done, _| {
            *done += 1;
            // Whoever comes first is slow for good, so that both cases occur.
            let me = std::thread::current().id();
            if *slow.lock().unwrap().get_or_insert(me) == me {
                spend(2_000_000);
            }
        });
    }
    assert_eq!(done[0] + done[1], 300);
    assert!(done.iter().min().is_some_and(|&few| few < 150), "{done:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_process_that_may_use_one_core_computes_on_one() {
    // Of this thread only.
    let threads = std::thread::spawn(|| {
        pin_to(allowed_cores()[0]);
        assert_eq!(allowed_cores().len(), 1);
        crate::CpuBackend::new(&crate::CpuConfig::default()).threads()
    });
    assert_eq!(threads.join().unwrap(), 1);
}

#[test]
fn more_threads_than_cores_still_finish() {
    let pool = Pool::new(16).unwrap();
    let mut data = vec![0u32; 512];
    for _ in 0..200 {
        pool.for_each_chunk(&mut data, 3, |_, chunk| {
            for x in chunk {
                *x += 1;
            }
        });
    }
    assert!(data.iter().all(|&x| x == 200));
}
