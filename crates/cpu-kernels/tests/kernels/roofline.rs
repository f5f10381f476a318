use carat_cpu_kernels::{roofline::SUMS, table::Kernels};

#[test]
fn every_level_makes_as_many_products_per_round() {
    for kernels in Kernels::all() {
        let products = kernels.dots(64) / (3.0 * 5.0);
        assert_eq!(products, (64 * SUMS * 64) as f32, "{:?}", kernels.isa());
    }
}
