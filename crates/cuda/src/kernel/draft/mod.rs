//! Drafters: the head by clusters, and what goes from one draft step to the next.

pub(crate) mod cluster_logits;
pub(crate) mod draft_next;
pub(crate) mod nearest_clusters;
