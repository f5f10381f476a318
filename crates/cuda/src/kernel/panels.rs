//! Panels: how quantized matrices lie on the device, in the order in which tensor cores take them.
//!
//! 16 output rows are a strip. A strip is cut along its inputs into units; unit follows unit, strip follows strip. Rows
//! are padded to a strip and inputs to a unit with zero bytes, which stand for zeros. Within a unit a warp's lane
//! `4 * group + quad` finds its operands side by side: rows `group` and `group + 8`, and of every 32 inputs (16 in K6)
//! the quarter `quad`. Scales lie behind the codes.
//!
//! `panels/plain.rs` is the definition: a plain packer, and the value of every place, bit for bit what `carat-gguf`
//! makes of the file. `kernels/load/pack.cu` packs on the device, `kernels/lib/panel.cuh` reads there; both are compared with
//! it.

use carat_gguf::QuantType;

#[cfg(test)]
mod plain;

#[cfg(test)]
pub(crate) use plain::pack;

/// Rows of a strip.
pub(crate) const STRIP: usize = 16;

/// How codes and scales lie in a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum PanelFormat {
    /// Signed bytes, a half scale a 32 inputs: Q8_0, and Q5_0 and IQ4_NL, whose codes fit a byte.
    Q8,
    /// Signed nibbles, a half scale a 32 inputs: Q4_0.
    Q4,
    /// Q4_K: nibbles, a scale and a minimum a 32 inputs.
    K4,
    /// Q5_K: K4 with fifth bits apart.
    K5,
    /// Q6_K: signed 6-bit codes in two planes, a signed scale a 16 inputs.
    K6,
}

impl PanelFormat {
    pub(crate) const ALL: [PanelFormat; 5] = [
        PanelFormat::Q8,
        PanelFormat::Q4,
        PanelFormat::K4,
        PanelFormat::K5,
        PanelFormat::K6,
    ];

    /// `None` for formats that have no panels: floats, and those that become halves.
    pub(crate) fn of(quant: QuantType) -> Option<PanelFormat> {
        Some(match quant {
            QuantType::Q8_0 | QuantType::Q5_0 | QuantType::IQ4_NL => PanelFormat::Q8,
            QuantType::Q4_0 => PanelFormat::Q4,
            QuantType::Q4_K => PanelFormat::K4,
            QuantType::Q5_K => PanelFormat::K5,
            QuantType::Q6_K => PanelFormat::K6,
            _ => return None,
        })
    }

    /// What kernels call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PanelFormat::Q8 => "q8",
            PanelFormat::Q4 => "q4",
            PanelFormat::K4 => "k4",
            PanelFormat::K5 => "k5",
            PanelFormat::K6 => "k6",
        }
    }

    pub(crate) fn unit_inputs(self) -> usize {
        match self {
            PanelFormat::Q8 | PanelFormat::Q4 => 64,
            PanelFormat::K4 | PanelFormat::K5 | PanelFormat::K6 => 256,
        }
    }

    pub(crate) fn unit_bytes(self) -> usize {
        match self {
            PanelFormat::Q8 => 1088,
            PanelFormat::Q4 => 576,
            PanelFormat::K4 => 2368,
            PanelFormat::K5 => 2880,
            PanelFormat::K6 => 3360,
        }
    }

    /// Units of a strip.
    pub(crate) fn units(self, columns: usize) -> usize {
        columns.div_ceil(self.unit_inputs())
    }

    /// Bytes of a strip.
    pub(crate) fn strip_bytes(self, columns: usize) -> usize {
        self.units(columns) * self.unit_bytes()
    }

    /// Bytes of a matrix.
    #[cfg(test)]
    pub(crate) fn panel_bytes(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(STRIP) * self.strip_bytes(columns)
    }
}
