//! Mixture of experts: top-k routing, permutation of tokens by expert, plain products, weighted sum. The fast products are
//! `linear::gemv` and the grouped GEMMs of `linear::gemm` and `linear::gemm_packed`.

pub(crate) mod experts_linear;
pub(crate) mod experts_sum;
pub(crate) mod permute;
pub(crate) mod route;
pub(crate) mod router_scores;
