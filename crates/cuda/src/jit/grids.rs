//! Text of `lib/grid_tables.cuh`: the grids as `carat-gguf` has them, so that there is one copy.

use std::fmt::{LowerHex, Write};

use carat_gguf::quant::{
    IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID,
};

/// The tables, each for kernels of its own formats alone: others need not read thousands of numbers.
pub(super) fn text() -> String {
    let mut out = String::new();
    table(&mut out, "IQ2_XXS", &["iq2_xxs"], &IQ2_XXS_GRID);
    table(&mut out, "IQ2_XS", &["iq2_xs"], &IQ2_XS_GRID);
    table(&mut out, "IQ2_S", &["iq2_s"], &IQ2_S_GRID);
    table(&mut out, "IQ3_XXS", &["iq3_xxs"], &IQ3_XXS_GRID);
    table(&mut out, "IQ3_S", &["iq3_s"], &IQ3_S_GRID);
    table(&mut out, "IQ1", &["iq1_s", "iq1_m"], &IQ1_GRID);
    out
}

/// `GRID_a_a` is defined, so that `GRID_IS` holds for `a` and for nothing else.
fn table<T: LowerHex>(out: &mut String, name: &str, formats: &[&str], grid: &[T]) {
    let tests: Vec<String> = formats.iter().map(|f| format!("GRID_IS({f})")).collect();
    let written = (|| {
        for format in formats {
            writeln!(out, "#define GRID_{format}_{format} 1")?;
        }
        writeln!(out, "#if {}", tests.join(" || "))?;
        write!(out, "__device__ const u64 {name}_GRID[{}] = {{", grid.len())?;
        for (i, vector) in grid.iter().enumerate() {
            write!(out, "{}{vector:#x},", if i % 8 == 0 { "\n" } else { " " })?;
        }
        writeln!(out, "\n}};\n#endif")
    })();
    written.expect("strings take all writes");
}
