//! Tile registers of Sapphire Rapids and later (AMX-TILE and AMX-INT8). The instructions have no stable intrinsics, so
//! they are written out.
#![expect(
    unsafe_code,
    reason = "tile instructions; they are checked for where the kernel table is chosen"
)]

use std::{arch::asm, marker::PhantomData};

use super::{
    LANES,
    tiles::{Square, Tile, Tiles},
};

/// The state component of tile data, which a process asks the kernel for.
#[cfg(target_os = "linux")]
const TILE_DATA: u64 = 18;
#[cfg(target_os = "linux")]
const REQUEST_PERMISSION: u64 = 0x1023;

/// Whether the processor has the tile instructions and the kernel lets this process use them.
pub(crate) fn permitted() -> bool {
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    let (tile, int8) = (1 << 24, 1 << 25);
    leaf.edx & tile != 0 && leaf.edx & int8 != 0 && request()
}

#[cfg(target_os = "linux")]
fn request() -> bool {
    // SAFETY: The call takes no addresses. It allows all threads of this process to use the registers, however often it
    // is made, or refuses.
    let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) };
    refused == 0
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}

/// How many rows and bytes each register has, as the processor reads it.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3 hold left tiles, 4 to 6 take turns with the sums, 7 has the right tile.
pub(crate) struct AmxTiles {
    row_bytes: usize,
    /// The registers belong to the thread that took them.
    thread: PhantomData<*const ()>,
}

const LINE: usize = 64;

impl Tiles for AmxTiles {
    #[inline(always)]
    fn take(group: usize) -> AmxTiles {
        assert!(group == 32 || group == 16, "groups of {group}");
        let mut shapes = Shapes {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        for register in 0..8 {
            let left = register < 4;
            shapes.row_bytes[register] = if left { group as u16 } else { LINE as u16 };
            shapes.rows[register] = if register == 7 {
                group as u8 / 4
            } else {
                LANES as u8
            };
        }
        // SAFETY: `Isa::Amx` was found available, so the instruction exists and the kernel lets us. The palette is the
        // first, and no shape is larger than its registers.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly));
        }
        AmxTiles {
            row_bytes: group,
            thread: PhantomData,
        }
    }

    #[inline(always)]
    fn hold(&mut self, place: usize, left: &Tile) {
        macro_rules! load {
            ($register:literal) => {
                // SAFETY: Reads sixteen rows of at most 32 bytes each, one after the other, which is at most the tile.
                unsafe {
                    asm!(
                        concat!("tileloadd ", $register, ", [{from} + {stride}]"),
                        from = in(reg) left.as_ptr(),
                        stride = in(reg) self.row_bytes,
                        options(nostack, readonly)
                    )
                }
            };
        }
        match place {
            0 => load!("tmm0"),
            1 => load!("tmm1"),
            2 => load!("tmm2"),
            3 => load!("tmm3"),
            _ => panic!("there is no place {place}"),
        }
    }

    #[inline(always)]
    fn multiply(&mut self, place: usize, right: &Tile, out: &mut Square) {
        macro_rules! product {
            ($left:literal, $sums:literal) => {
                // SAFETY: Reads at most the eight lines of the right tile and writes the sixteen of the square.
                unsafe {
                    asm!(
                        "tileloadd tmm7, [{right} + {line}]",
                        concat!("tilezero ", $sums),
                        concat!("tdpbssd ", $sums, ", ", $left, ", tmm7"),
                        concat!("tilestored [{out} + {line}], ", $sums),
                        right = in(reg) right.as_ptr(),
                        out = in(reg) out.0.as_mut_ptr(),
                        line = in(reg) LINE,
                        options(nostack)
                    )
                }
            };
        }
        match place {
            0 => product!("tmm0", "tmm4"),
            1 => product!("tmm1", "tmm5"),
            2 => product!("tmm2", "tmm6"),
            3 => product!("tmm3", "tmm4"),
            _ => panic!("there is no place {place}"),
        }
    }
}

impl Drop for AmxTiles {
    fn drop(&mut self) {
        // SAFETY: Gives back what `take` took; nothing of this thread uses the registers any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
