//! Twin of `kernels/norm/norm_wide.cu`.

use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, Kernel, Place, RowsAt, Specialization,
    form::{Form, FormAt},
    norm_threads,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::Packed,
};

/// Fours a thread holds, for rows of up to 512 times as many columns.
pub(crate) const HOLDS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

/// The widest rows that a block's threads hold.
pub(crate) const MOST_COLUMNS: usize = 512 * HOLDS.len();

params! {
    struct NormWideParams {
        rows: RowsAt,
        x: Address,
        factor: Address,
        weight: Address,
        a: Address,
        sum: Address,
        sum_form: FormAt,
        next_weight: Address,
        next: Address,
        next_form: FormAt,
        columns: u32,
        eps: f32,
        by: f32,
        next_eps: f32,
    }
}

/// Where a norm goes: as f32, in a form, or both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormOut {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) values: Option<Place>,
    pub(crate) form: Option<Form>,
}

impl NormOut {
    fn places(&self) -> impl Iterator<Item = Place> + use<> {
        let form = self.form.iter().flat_map(Form::places);
        self.values.into_iter().chain(form.collect::<Vec<_>>())
    }
}

/// `out = norm(x * factor)` over whole rows of at most [`MOST_COLUMNS`].
#[derive(Debug)]
pub(crate) struct NormWide {
    pub(crate) x: Place,
    /// A power of two for each row.
    pub(crate) factor: Option<Place>,
    pub(crate) columns: usize,
    pub(crate) out: NormOut,
}

/// `sum = (a + norm(x * factor)) * by`, and the norm of that for whoever comes next; rows of at most [`MOST_COLUMNS`].
#[derive(Debug)]
pub(crate) struct NormAddWide {
    pub(crate) x: Place,
    /// A power of two for each row.
    pub(crate) factor: Option<Place>,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) a: Place,
    pub(crate) by: f32,
    pub(crate) sum: Place,
    pub(crate) sum_form: Option<Form>,
    pub(crate) next: Option<NormOut>,
    pub(crate) columns: usize,
}

pub(crate) fn specialization(hold: usize) -> Specialization {
    Specialization {
        kernel: "norm_wide",
        entries: &["norm_wide", "norm_add_wide"],
        constants: vec![("HOLD", hold.to_string())],
        params_bytes: NormWideParams::BYTES,
    }
}

fn specialization_for(columns: usize) -> Specialization {
    let hold = columns.div_ceil(512);
    assert!(
        columns.is_multiple_of(4) && HOLDS.contains(&hold),
        "{columns} columns"
    );
    specialization(hold)
}

/// A thread for four of the plain norm's, in whole warps.
fn grid(entry: usize, rows: usize, columns: usize) -> Grid {
    let threads = norm_threads(columns) / 4;
    Grid {
        entry,
        ..Grid::new((rows, 1), threads.next_multiple_of(32))
    }
}

impl Kernel for NormWide {
    fn specialization(&self) -> Specialization {
        specialization_for(self.columns)
    }

    fn grid(&self, rows: usize) -> Grid {
        grid(0, rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        NormWideParams {
            rows,
            x: at.place(self.x),
            factor: self.factor.map_or(Address::NULL, |p| at.place(p)),
            weight: at.vector(self.out.weight),
            a: Address::NULL,
            sum: Address::NULL,
            sum_form: Form::at(None, at),
            next_weight: Address::NULL,
            next: self.out.values.map_or(Address::NULL, |p| at.place(p)),
            next_form: Form::at(self.out.form, at),
            columns: self.columns as u32,
            eps: self.out.eps,
            by: 1.0,
            next_eps: 0.0,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        Packed::vectors([self.out.weight])
    }

    fn reads(&self) -> Vec<Place> {
        [self.x].into_iter().chain(self.factor).collect()
    }

    fn writes(&self) -> Vec<Place> {
        self.out.places().collect()
    }
}

impl Kernel for NormAddWide {
    fn specialization(&self) -> Specialization {
        specialization_for(self.columns)
    }

    fn grid(&self, rows: usize) -> Grid {
        grid(1, rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let place = |p: Option<Place>| p.map_or(Address::NULL, |p| at.place(p));
        NormWideParams {
            rows,
            x: at.place(self.x),
            factor: place(self.factor),
            weight: at.vector(self.weight),
            a: at.place(self.a),
            sum: at.place(self.sum),
            sum_form: Form::at(self.sum_form, at),
            next_weight: at.vector(self.next.and_then(|n| n.weight)),
            next: place(self.next.and_then(|n| n.values)),
            next_form: Form::at(self.next.and_then(|n| n.form), at),
            columns: self.columns as u32,
            eps: self.eps,
            by: self.by,
            next_eps: self.next.map_or(0.0, |n| n.eps),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        Packed::vectors([self.weight, self.next.and_then(|n| n.weight)])
    }

    fn reads(&self) -> Vec<Place> {
        [self.x, self.a].into_iter().chain(self.factor).collect()
    }

    fn writes(&self) -> Vec<Place> {
        let form = self.sum_form.iter().flat_map(Form::places);
        let next = self.next.iter().flat_map(NormOut::places);
        [self.sum].into_iter().chain(form).chain(next).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::{
            Elementwise, Function, Norm, Second,
            testing::{FormBuffers, Kind, Table},
        },
        testing::{normals, relative_error},
    };

    const EPS: f32 = 1e-6;
    const SIZES: [usize; 7] = [32, 96, 512, 544, 1536, 2560, 5376];

    fn reference(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
        let square = |v: &f32| f64::from(*v).powi(2);
        let mean = x.iter().map(square).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        let pairs = x.iter().zip(weight);
        pairs
            .map(|(v, w)| f64::from(*v) * scale * f64::from(*w))
            .collect()
    }

    /// A norm, a sum and a scale by a kernel each.
    struct SingleSteps {
        x: Place,
        a: Place,
        weight: Option<Weight>,
        by: f32,
        columns: usize,
    }

    impl SingleSteps {
        fn norm(&self, x: Place, weight: Option<Weight>, out: Place) -> Norm {
            Norm {
                x,
                weight,
                columns: self.columns,
                group: self.columns,
                eps: EPS,
                out,
            }
        }

        fn run(&self, table: &mut Table, (rows, room): (usize, usize), sum: Place) {
            let columns = self.columns;
            let [normed, added] = [(); 2].map(|()| table.poison(room * columns));
            let second = Second {
                place: normed,
                columns,
                column: 0,
            };
            let add = Elementwise {
                function: Function::Add(second),
                a: self.a,
                columns,
                out: added,
            };
            let scale = Elementwise {
                function: Function::Scale { by: self.by },
                a: added,
                columns,
                out: sum,
            };
            table.run(rows, room, &self.norm(self.x, self.weight, normed));
            table.run(rows, room, &add);
            table.run(rows, room, &scale);
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn norm_wide_has_the_bits_of_norm_in_every_form() {
        let mut table = Table::new();
        for columns in SIZES {
            for kind in [None, Some(Kind::F16), Some(Kind::Q8), Some(Kind::Q16)] {
                let (rows, room) = (3, 5);
                let x = normals(1, room * columns);
                let weight = normals(2, columns);
                let x_at = table.put(&x);
                let w = table.weight(&weight);
                let (plain, values) = (table.poison(room * columns), table.poison(room * columns));
                let form = kind.map(|kind| FormBuffers::new(&mut table, kind, room, columns));
                table.run(
                    rows,
                    room,
                    &Norm {
                        x: x_at,
                        weight: Some(w),
                        columns,
                        group: columns,
                        eps: EPS,
                        out: plain,
                    },
                );
                table.run(
                    rows,
                    room,
                    &NormWide {
                        x: x_at,
                        factor: None,
                        columns,
                        out: NormOut {
                            weight: Some(w),
                            eps: EPS,
                            values: Some(values),
                            form: form.as_ref().map(|f| f.form),
                        },
                    },
                );
                let plain = table.get::<f32>(plain, room * columns);
                let values = table.get::<f32>(values, room * columns);
                assert!(values[rows * columns..].iter().all(|v| v.is_nan()));
                let expected = &plain[..rows * columns];
                assert_eq!(&values[..rows * columns], expected, "{columns} columns");
                let exact: Vec<f32> = x[..rows * columns]
                    .chunks_exact(columns)
                    .flat_map(|row| reference(row, &weight, EPS))
                    .map(|v| v as f32)
                    .collect();
                assert!(relative_error(expected, &exact) < 1e-6);
                if let Some(form) = form {
                    form.check(&table, expected, rows);
                }
                table.clear();
            }
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn norm_add_wide_has_the_bits_of_single_steps_in_every_form() {
        let mut table = Table::new();
        for (n, columns) in SIZES.into_iter().enumerate() {
            let (rows, room) = (3, 4);
            let all = room * columns;
            let factors = [0.25f32, 1.0, 8.0, 2.0];
            let (x, a) = (normals(1, all), normals(2, all));
            let scaled: Vec<f32> = (0..all).map(|i| x[i] * factors[i / columns]).collect();
            let (w, next_w) = (normals(3, columns), normals(4, columns));
            let (x_at, scaled, a) = (table.put(&x), table.put(&scaled), table.put(&a));
            let factor = table.put(&factors);
            let (w, next_w) = (table.weight(&w), table.weight(&next_w));
            let [plain_sum, plain_next, sum, next] = [(); 4].map(|()| table.poison(all));
            let steps = SingleSteps {
                x: scaled,
                a,
                weight: Some(w),
                by: 0.7,
                columns,
            };
            steps.run(&mut table, (rows, room), plain_sum);
            let norm = steps.norm(plain_sum, Some(next_w), plain_next);
            table.run(rows, room, &norm);
            let (sum_kind, next_kind) = match n % 3 {
                0 => (Kind::Q8, Kind::F16),
                1 => (Kind::F16, Kind::Q8),
                _ => (Kind::Q8, Kind::Q16),
            };
            let sum_form = FormBuffers::new(&mut table, sum_kind, room, columns);
            let next_form = FormBuffers::new(&mut table, next_kind, room, columns);
            table.run(
                rows,
                room,
                &NormAddWide {
                    x: x_at,
                    factor: Some(factor),
                    weight: Some(w),
                    eps: EPS,
                    a,
                    by: 0.7,
                    sum,
                    sum_form: Some(sum_form.form),
                    next: Some(NormOut {
                        weight: Some(next_w),
                        eps: EPS,
                        values: Some(next),
                        form: Some(next_form.form),
                    }),
                    columns,
                },
            );
            for (plain, fused, form) in [(plain_sum, sum, sum_form), (plain_next, next, next_form)]
            {
                let expected = table.get::<f32>(plain, all);
                let found = table.get::<f32>(fused, all);
                assert!(found[rows * columns..].iter().all(|v| v.is_nan()));
                assert_eq!(
                    found[..rows * columns],
                    expected[..rows * columns],
                    "{columns}"
                );
                form.check(&table, &expected[..rows * columns], rows);
            }
            table.clear();
        }
    }

    #[test]
    #[ignore = "needs a card"]
    fn norm_add_wide_alone_writes_the_sum_alone() {
        let mut table = Table::new();
        let (rows, columns) = (2, 64);
        let (x, a) = (table.put(&normals(1, 128)), table.put(&normals(2, 128)));
        let (plain, sum) = (table.poison(128), table.poison(128));
        let (weight, eps, by) = (None, EPS, 1.0);
        let steps = SingleSteps {
            x,
            a,
            weight,
            by,
            columns,
        };
        steps.run(&mut table, (rows, rows), plain);
        table.run(
            rows,
            rows,
            &NormAddWide {
                x,
                factor: None,
                weight,
                eps,
                a,
                by,
                sum,
                sum_form: None,
                next: None,
                columns,
            },
        );
        assert_eq!(table.get::<f32>(sum, 128), table.get::<f32>(plain, 128));
    }

    #[test]
    #[ignore = "needs a card"]
    fn norm_wide_timing() {
        let columns = 2560;
        for rows in [512, 2048] {
            let mut table = Table::new();
            let (turns, all) = (Table::turns(rows * columns * 8), rows * columns);
            let x = table.big(turns * all * 4);
            let a = table.big(turns * all * 4);
            let out = table.big(turns * all * 4);
            let form = table.big(turns * all * 2);
            let w = table.weight(&normals(1, columns));
            let mut norm = Vec::new();
            let mut norm_add = Vec::new();
            for turn in 0..turns {
                let x = table.shifted(x, turn * all * 4);
                let form = Some(Form::F16(table.shifted(form, turn * all * 2)));
                let next = NormOut {
                    weight: Some(w),
                    eps: EPS,
                    values: None,
                    form,
                };
                norm.push(NormWide {
                    x,
                    factor: None,
                    columns,
                    out: next,
                });
                norm_add.push(NormAddWide {
                    x,
                    factor: None,
                    weight: Some(w),
                    eps: EPS,
                    a: table.shifted(a, turn * all * 4),
                    by: 1.0,
                    sum: table.shifted(out, turn * all * 4),
                    sum_form: None,
                    next: Some(next),
                    columns,
                });
            }
            table.time("norm_wide f16", rows, all * 6, &norm);
            table.time("norm_add_wide, next f16", rows, all * 14, &norm_add);
        }
    }
}
