//! Norms by themselves, and with the residual add.

use crate::{
    kernel::{
        Activation, FusedNorm, FusedResidualNorm, NormOut, norm::fused_norm::tests::EPS,
        testing::Table,
    },
    testing::normals,
};

pub(crate) fn all() {
    let columns = 2560;
    for rows in [512, 2048] {
        let mut table = Table::new();
        let (rotations, all) = (Table::rotations(rows * columns * 8), rows * columns);
        let x = table.big(rotations * all * 4);
        let a = table.big(rotations * all * 4);
        let out = table.big(rotations * all * 4);
        let activation = table.big(rotations * all * 2);
        let w = table.weight(&normals(1, columns));
        let mut norm = Vec::new();
        let mut residual_norm = Vec::new();
        for rotation in 0..rotations {
            let x = table.shifted(x, rotation * all * 4);
            let activation = Some(Activation::F16(
                table.shifted(activation, rotation * all * 2),
            ));
            let next = NormOut {
                weight: Some(w),
                eps: EPS,
                values: None,
                activation,
            };
            norm.push(FusedNorm {
                x,
                factor: None,
                columns,
                out: next,
                pdl: false,
            });
            residual_norm.push(FusedResidualNorm {
                x,
                factor: None,
                weight: Some(w),
                eps: EPS,
                residual: table.shifted(a, rotation * all * 4),
                scale: 1.0,
                sum: table.shifted(out, rotation * all * 4),
                sum_activation: None,
                following: Some(next),
                branch: None,
                columns,
                pdl: false,
            });
        }
        table.time("fused_norm f16", rows, all * 6, &norm);
        table.time(
            "fused_residual_norm, next f16",
            rows,
            all * 14,
            &residual_norm,
        );
    }
}
