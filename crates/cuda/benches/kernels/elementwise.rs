//! GEGLU and conversions between activation formats.

use crate::kernel::{Activation, ColumnSlice, Convert, Geglu, Int8Operands, testing::Table};

pub(crate) fn geglu() {
    for (columns, rows) in [(10240, 512), (10240, 2048), (15360, 2048)] {
        let mut table = Table::new();
        let rotations = Table::rotations(rows * columns * 6);
        let x = table.big(rotations * rows * columns * 4);
        let out = table.big(rotations * rows * columns * 2);
        let factor = table.big(rows * 4);
        let call = |rotation| Geglu {
            x: table.shifted(x, rotation * rows * columns * 4),
            x_scale: 64.0,
            columns,
            out: table.shifted(out, rotation * rows * columns * 2),
            tiles: false,
            factor,
            pdl: false,
        };
        let calls: Vec<Geglu> = (0..rotations).map(call).collect();
        let name = format!("geglu {columns}");
        table.time(&name, rows, rows * columns * 6, &calls);
    }
}

pub(crate) fn convert() {
    for rows in [512, 2048] {
        let mut table = Table::new();
        let (columns, wide) = (2048, 10752);
        let rotations = Table::rotations(rows * columns * 6);
        let a = table.big(rotations * rows * columns * 4);
        let out = table.big(rotations * rows * columns * 2);
        let small = table.big(rows * columns * 4);
        let convert = |rotation: usize| Convert {
            a: table.shifted(a, rotation * rows * columns * 4),
            gelu_mul: None,
            columns,
            out: Activation::F16(table.shifted(out, rotation * rows * columns * 2)),
            pdl: false,
        };
        let calls: Vec<Convert> = (0..rotations).map(convert).collect();
        table.time("convert f16 2048", rows, rows * columns * 6, &calls);
        let convert = |rotation: usize| Convert {
            out: Activation::Int8(Int8Operands {
                codes: table.shifted(out, rotation * rows * columns),
                scales: small,
                sums: table.shifted(small, rows * columns / 8),
            }),
            ..convert(rotation)
        };
        let calls: Vec<Convert> = (0..rotations).map(convert).collect();
        table.time("convert q8 2048", rows, rows * columns * 21 / 4, &calls);
        let slices = table.big(rows * wide * 4);
        let gates = Table::rotations(rows * 256 * 10);
        let gate = table.big(gates * rows * 256 * 4);
        let slice = |rotation: usize| Convert {
            a: table.shifted(gate, rotation * rows * 256 * 4),
            gelu_mul: Some(ColumnSlice {
                operand: slices,
                columns: wide,
                column: rotation % 42 * 256,
            }),
            columns: 256,
            out: Activation::F16(table.shifted(out, rotation * rows * 256 * 2)),
            pdl: false,
        };
        let calls: Vec<Convert> = (0..gates.min(rotations * 8)).map(slice).collect();
        table.time("convert_gelu_mul f16 256", rows, rows * 256 * 10, &calls);
    }
}
