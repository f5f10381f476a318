use carat_cpu_kernels::aligned::{Aligned, LINE_BYTES};

#[test]
fn begins_at_a_line_and_keeps_its_length() {
    for length in [0, 1, 15, 1000, 1 << 20] {
        let mut memory = Aligned::<f32>::new(length);
        assert_eq!(memory.len(), length);
        assert_eq!(memory.as_ptr().align_offset(LINE_BYTES), 0);
        memory.reserve_exactly(length / 2);
        assert_eq!(memory.len(), length / 2);
        memory.reserve_exactly(3 * length);
        assert_eq!(memory.len(), 3 * length);
        assert_eq!(memory.as_ptr().align_offset(LINE_BYTES), 0);
    }
}
