//! Index of complete pages by content, so that a prompt finds the pages an earlier one has filled.
//!
//! A *block* is a page's worth of tokens after a given block, hence after a given whole prefix: KV depends on
//! everything before it. Blocks form a tree, kept as one map from (block before, tokens) to the pages that hold the
//! block's KV. The map compares the tokens themselves, and a block's number is never used again, so a prefix that is
//! found is the prefix that was asked for; no hash is trusted, but for the digests that media come with. Those stand in the key of
//! every block that a row of media is in: the tokens beside an image are the same for every image of its size. Each cache salt
//! has a tree of its own.
//!
//! A block's KV is in *places*, on the device and in host memory, of each group of layers. It lives as long as its KV of full attention
//! is in one of them. Its sliding-window KV may be lost before, because the groups run out separately. Of blocks that are gone a digest is
//! remembered for a while, to tell a prompt that was cached from one that never was.

use carat_model::kv::{HostPageId, KvGroup, PAGE_TOKENS, PageId, PerGroup};
use rustc_hash::FxHashMap;

use super::{
    chain::{BlockContents, ChainKey},
    forgotten::Forgotten,
    media::Content,
};

/// A block's number, and where the index keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockId {
    number: u64,
    pub(crate) slot: Slot,
}

/// Predecessor of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Parent {
    /// Nothing: it is a first block, of those with this salt.
    Root(Option<[u8; 16]>),
    Block(BlockId),
}

/// Copies of the KV that one group has of a block: on the device, in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) device: Option<PageId>,
    pub(crate) host: Option<HostPageId>,
}

impl Places {
    pub(crate) fn is_nowhere(self) -> bool {
        self.device.is_none() && self.host.is_none()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) id: BlockId,
    pub(crate) places: PerGroup<Places>,
}

/// Index of a block's entry. Taken by another when the block is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u32);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    contents: BlockContents,
}

impl Key {
    /// Of the block at a place of some content, counted in blocks.
    fn new(parent: Parent, content: &Content<'_>, place: usize) -> Key {
        Key {
            parent,
            contents: BlockContents::new(content, place),
        }
    }
}

struct Node {
    key: Key,
    chain: ChainKey,
    block: Block,
    /// Blocks that follow it, and those of them whose KV of full attention is on the device.
    followers: usize,
    followers_on_device: usize,
}

/// A block as one of those that a prefix is made of.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) contents: BlockContents,
    pub(crate) chain: ChainKey,
    pub(crate) places: PerGroup<Places>,
}

pub(crate) struct PrefixIndex {
    slots: FxHashMap<Key, Slot>,
    nodes: Vec<Option<Node>>,
    free: Vec<Slot>,
    /// By page: the block whose KV it holds.
    on_device: PerGroup<Vec<Option<Slot>>>,
    in_host: PerGroup<Vec<Option<Slot>>>,
    last: u64,
    forgotten: Forgotten,
}

impl PrefixIndex {
    pub(crate) fn new(pages: PerGroup<usize>, host_pages: PerGroup<usize>) -> PrefixIndex {
        PrefixIndex {
            slots: FxHashMap::default(),
            nodes: Vec::new(),
            free: Vec::new(),
            on_device: pages.map(|count| vec![None; count]),
            in_host: host_pages.map(|count| vec![None; count]),
            last: 0,
            forgotten: Forgotten::default(),
        }
    }

    /// The block at a place of `content`, after `parent`.
    pub(crate) fn child(
        &self,
        parent: Parent,
        content: &Content<'_>,
        place: usize,
    ) -> Option<Block> {
        let slot = self.slots.get(&Key::new(parent, content, place))?;
        Some(self.node(*slot).block)
    }

    /// The cached blocks that `content` begins with, as far as they go. An incomplete page at the end is not looked for.
    pub(crate) fn walk<'a>(&'a self, content: Content<'a>) -> impl Iterator<Item = Block> + 'a {
        let mut parent = Parent::Root(content.salt);
        (0..content.tokens.len() / PAGE_TOKENS).map_while(move |place| {
            let block = self.child(parent, &content, place)?;
            parent = Parent::Block(block.id);
            Some(block)
        })
    }

    /// Registers a block that [`PrefixIndex::child`] does not find. It is given places next.
    pub(crate) fn insert(&mut self, parent: Parent, content: &Content<'_>, place: usize) -> Block {
        let key = Key::new(parent, content, place);
        self.last += 1;
        let chain = self.chain_of(parent).then(&key.contents);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            Slot(self.nodes.len() as u32 - 1)
        });
        let block = Block {
            id: BlockId {
                number: self.last,
                slot,
            },
            places: PerGroup::default(),
        };
        let before = self.slots.insert(key.clone(), slot);
        debug_assert!(before.is_none(), "a block is registered once");
        self.nodes[slot.0 as usize] = Some(Node {
            key,
            chain,
            block,
            followers: 0,
            followers_on_device: 0,
        });
        if let Some(before) = self.before_mut(slot) {
            before.followers += 1;
        }
        block
    }

    /// A block's KV is in this page, too.
    pub(crate) fn put_on_device(&mut self, slot: Slot, group: KvGroup, page: PageId) {
        let places = self.places_mut(slot, group);
        debug_assert!(places.device.is_none(), "it is on the device");
        places.device = Some(page);
        self.on_device.get_mut(group)[page.0 as usize] = Some(slot);
        if let (KvGroup::Full, Some(before)) = (group, self.before_mut(slot)) {
            before.followers_on_device += 1;
        }
    }

    /// A block's KV is in this place of host memory, too.
    pub(crate) fn put_in_host(&mut self, slot: Slot, group: KvGroup, page: HostPageId) {
        let places = self.places_mut(slot, group);
        debug_assert!(places.host.is_none(), "it is in host memory");
        places.host = Some(page);
        self.in_host.get_mut(group)[page.0 as usize] = Some(slot);
    }

    /// The page was given away. Returns the block whose KV it held, as it is without.
    pub(crate) fn take_from_device(&mut self, group: KvGroup, page: PageId) -> Block {
        let slot = self.on_device.get_mut(group)[page.0 as usize]
            .take()
            .expect("a kept page holds a block");
        self.places_mut(slot, group).device = None;
        if let (KvGroup::Full, Some(before)) = (group, self.before_mut(slot)) {
            before.followers_on_device -= 1;
        }
        self.node(slot).block
    }

    /// Whether a page may be given away: on the device, no block is without the full page of the one before it.
    pub(crate) fn may_leave_device(&self, group: KvGroup, page: PageId) -> bool {
        let slot = self.on_device.get(group)[page.0 as usize];
        let is_last = |slot| self.node(slot).followers_on_device == 0;
        group == KvGroup::Sliding || slot.is_none_or(is_last)
    }

    /// Whether a place in host memory may be given away: no block is without the one before it.
    pub(crate) fn may_leave_host(&self, group: KvGroup, page: HostPageId) -> bool {
        let slot = self.in_host.get(group)[page.0 as usize];
        let is_last = |slot| {
            let node = self.node(slot);
            node.followers == 0 || node.block.places.full.device.is_some()
        };
        group == KvGroup::Sliding || slot.is_none_or(is_last)
    }

    /// The block before one; `None` if there is none, or if it is gone.
    pub(crate) fn before(&self, slot: Slot) -> Option<Slot> {
        let Parent::Block(before) = self.node(slot).key.parent else {
            return None;
        };
        let node = self.nodes[before.slot.0 as usize].as_ref();
        node.filter(|node| node.block.id == before)
            .map(|_| before.slot)
    }

    fn before_mut(&mut self, slot: Slot) -> Option<&mut Node> {
        let before = self.before(slot)?;
        self.nodes[before.0 as usize].as_mut()
    }

    /// The place in host memory was given away. Returns the block whose KV it held, as it is without.
    pub(crate) fn take_from_host(&mut self, group: KvGroup, page: HostPageId) -> Block {
        let slot = self.in_host.get_mut(group)[page.0 as usize]
            .take()
            .expect("a kept page holds a block");
        self.places_mut(slot, group).host = None;
        self.node(slot).block
    }

    /// Forgets a block whose KV of full attention is lost. Its sliding pages are taken from it before.
    pub(crate) fn remove(&mut self, slot: Slot) {
        if let Some(before) = self.before_mut(slot) {
            before.followers -= 1;
        }
        let node = self.nodes[slot.0 as usize].take();
        let node = node.expect("a block is removed once");
        let places = node.block.places;
        debug_assert!(places.full.is_nowhere() && places.sliding.is_nowhere());
        self.slots.remove(&node.key);
        self.free.push(slot);
        self.forgotten.insert(node.chain);
    }

    /// Whether the block at a place of `content`, which is not there, once was. Asked after a walk has ended: it costs a digest.
    pub(crate) fn was_known(&self, parent: Parent, content: &Content<'_>, place: usize) -> bool {
        let contents = BlockContents::new(content, place);
        let chain = self.chain_of(parent).then(&contents);
        self.forgotten.contains(chain)
    }

    /// The digest of everything up to the end of what stands before a block.
    fn chain_of(&self, parent: Parent) -> ChainKey {
        match parent {
            Parent::Root(salt) => ChainKey::root(salt),
            Parent::Block(id) => self.node(id.slot).chain,
        }
    }

    /// The digest that the first block before this one follows.
    pub(crate) fn root_of(&self, last: Parent) -> ChainKey {
        let mut at = last;
        while let Parent::Block(id) = at {
            at = self.node(id.slot).key.parent;
        }
        self.chain_of(at)
    }

    /// All blocks up to this one, from the first; `None` if one of them is gone.
    pub(crate) fn lineage(&self, last: Parent) -> Option<Vec<Link>> {
        let mut links = Vec::new();
        let mut at = last;
        while let Parent::Block(id) = at {
            let node = self.nodes[id.slot.0 as usize].as_ref();
            let node = node.filter(|node| node.block.id == id)?;
            links.push(Link {
                contents: node.key.contents.clone(),
                chain: node.chain,
                places: node.block.places,
            });
            at = node.key.parent;
        }
        links.reverse();
        Some(links)
    }

    /// Copies of the KV of a block.
    pub(crate) fn places(&self, slot: Slot) -> PerGroup<Places> {
        self.node(slot).block.places
    }

    fn node(&self, slot: Slot) -> &Node {
        self.nodes[slot.0 as usize]
            .as_ref()
            .expect("a slot is known as long as its block")
    }

    fn places_mut(&mut self, slot: Slot, group: KvGroup) -> &mut Places {
        let node = self.nodes[slot.0 as usize].as_mut();
        let node = node.expect("a slot is known as long as its block");
        node.block.places.get_mut(group)
    }
}

#[cfg(test)]
mod tests;
