//! Mixture of experts: routing, permutation of tokens by expert, products, weighted sum.

pub(crate) mod experts_linear;
pub(crate) mod experts_sum;
pub(crate) mod permute;
pub(crate) mod route;
