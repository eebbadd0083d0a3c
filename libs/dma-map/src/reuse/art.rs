//! An adaptive radix tree over eight-byte keys (Leis et al., ICDE 2013), in safe Rust: nodes of 4, 16, 48 and 256
//! children in an arena each, referred to by number.
//!
//! A path without branches is compressed into the prefix of the node below it, and a leaf stands for the whole rest
//! of its key. The tree holds numbers only; the key of a number is the caller's to say (`key_of`).

use alloc::boxed::Box;
use alloc::vec::Vec;

/// Bytes of a key, most significant first: pages that lie together share their path.
const KEY_BYTES: usize = 8;

/// A leaf, or a node of one of the arenas: the kind in the three highest bits, the number below.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ref(u32);

const KIND_SHIFT: u32 = 29;
const NUMBER: u32 = (1 << KIND_SHIFT) - 1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Leaf,
    Node4,
    Node16,
    Node48,
    Node256,
}

impl Ref {
    const NONE: Self = Self(u32::MAX);

    fn new(kind: Kind, number: usize) -> Self {
        assert!(number < NUMBER as usize, "fewer than 2^29 nodes of a kind");
        Self((kind as u32) << KIND_SHIFT | number as u32)
    }

    #[inline]
    fn kind(self) -> Kind {
        match self.0 >> KIND_SHIFT {
            0 => Kind::Leaf,
            1 => Kind::Node4,
            2 => Kind::Node16,
            3 => Kind::Node48,
            _ => Kind::Node256,
        }
    }

    #[inline]
    fn number(self) -> usize {
        (self.0 & NUMBER) as usize
    }
}

/// What every inner node has.
#[derive(Clone, Copy, Default)]
struct Header {
    /// Bytes that all keys below share after those above, `prefix_len` of them.
    prefix: [u8; KEY_BYTES],
    prefix_len: u8,
    children: u16,
}

impl Header {
    fn prefix(&self) -> &[u8] {
        &self.prefix[..usize::from(self.prefix_len)]
    }

    fn set_prefix(&mut self, bytes: &[u8]) {
        self.prefix[..bytes.len()].copy_from_slice(bytes);
        self.prefix_len = bytes.len() as u8;
    }
}

/// Up to `N` children, `keys[i]` leading to `children[i]`, in no order.
struct Short<const N: usize> {
    header: Header,
    keys: [u8; N],
    children: [Ref; N],
}

impl<const N: usize> Short<N> {
    const EMPTY: Self = Self {
        header: Header {
            prefix: [0; KEY_BYTES],
            prefix_len: 0,
            children: 0,
        },
        keys: [0; N],
        children: [Ref::NONE; N],
    };

    #[inline]
    fn position(&self, byte: u8) -> Option<usize> {
        let len = usize::from(self.header.children);
        self.keys[..len].iter().position(|&key| key == byte)
    }

    fn push(&mut self, byte: u8, child: Ref) {
        let len = usize::from(self.header.children);
        self.keys[len] = byte;
        self.children[len] = child;
        self.header.children += 1;
    }

    fn remove(&mut self, at: usize) {
        let last = usize::from(self.header.children) - 1;
        self.keys[at] = self.keys[last];
        self.children[at] = self.children[last];
        self.header.children -= 1;
    }

    fn pairs(&self) -> impl Iterator<Item = (u8, Ref)> + '_ {
        let len = usize::from(self.header.children);
        self.keys[..len]
            .iter()
            .copied()
            .zip(self.children[..len].iter().copied())
    }
}

/// Up to 48 children: `index[byte]` is the child's position plus one.
struct Node48 {
    header: Header,
    index: [u8; 256],
    children: [Ref; 48],
}

impl Node48 {
    const EMPTY: Self = Self {
        header: Short::<4>::EMPTY.header,
        index: [0; 256],
        children: [Ref::NONE; 48],
    };

    fn push(&mut self, byte: u8, child: Ref) {
        let free = self.children.iter().position(|&c| c == Ref::NONE);
        let at = free.expect("a full node grows first");
        self.index[usize::from(byte)] = at as u8 + 1;
        self.children[at] = child;
        self.header.children += 1;
    }

    fn pairs(&self) -> impl Iterator<Item = (u8, Ref)> + '_ {
        let used = (0..=255u8).zip(self.index).filter(|&(_, at)| at != 0);
        used.map(|(byte, at)| (byte, self.children[usize::from(at) - 1]))
    }
}

/// A child for every byte.
struct Node256 {
    header: Header,
    children: [Ref; 256],
}

impl Node256 {
    const EMPTY: Self = Self {
        header: Short::<4>::EMPTY.header,
        children: [Ref::NONE; 256],
    };

    fn pairs(&self) -> impl Iterator<Item = (u8, Ref)> + '_ {
        let used = (0..=255u8).zip(self.children);
        used.filter(|&(_, child)| child != Ref::NONE)
    }
}

/// Nodes of one kind. What was removed is used again; memory is not given back.
struct Arena<T> {
    nodes: Vec<T>,
    free: Vec<u32>,
}

impl<T> Arena<T> {
    const EMPTY: Self = Self {
        nodes: Vec::new(),
        free: Vec::new(),
    };

    fn insert(&mut self, node: T) -> usize {
        match self.free.pop() {
            Some(number) => {
                self.nodes[number as usize] = node;
                number as usize
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    fn remove(&mut self, number: usize) {
        self.free.push(number as u32);
    }

    fn live(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<T>() + self.free.capacity() * size_of::<u32>()
    }
}

/// The tree.
pub(super) struct Art {
    root: Ref,
    node4: Arena<Short<4>>,
    node16: Arena<Short<16>>,
    node48: Arena<Node48>,
    /// Boxed: the arena moves its nodes when it grows.
    node256: Arena<Box<Node256>>,
}

impl Art {
    pub(super) const EMPTY: Self = Self {
        root: Ref::NONE,
        node4: Arena::EMPTY,
        node16: Arena::EMPTY,
        node48: Arena::EMPTY,
        node256: Arena::EMPTY,
    };

    /// The number kept for `key`.
    #[inline]
    pub(super) fn get(&self, key: u64, key_of: impl Fn(u32) -> u64) -> Option<u32> {
        let bytes = key.to_be_bytes();
        let mut node = self.root;
        let mut depth = 0;
        while node != Ref::NONE {
            if node.kind() == Kind::Leaf {
                let number = node.number() as u32;
                return (key_of(number) == key).then_some(number);
            }
            let prefix = self.header(node).prefix();
            if !bytes[depth..].starts_with(prefix) {
                return None;
            }
            depth += prefix.len();
            node = self.child(node, bytes[depth]);
            depth += 1;
        }
        None
    }

    /// Keeps `number` for `key`, which has none yet; `false`, and nothing happens, where it has.
    pub(super) fn insert(&mut self, key: u64, number: u32, key_of: impl Fn(u32) -> u64) -> bool {
        let bytes = key.to_be_bytes();
        let leaf = Ref::new(Kind::Leaf, number as usize);
        let mut above = None;
        let mut node = self.root;
        let mut depth = 0;
        loop {
            if node == Ref::NONE {
                // Only an empty tree leads here: a missing child is added where it is missed.
                self.hang(above, leaf);
                return true;
            }
            if node.kind() == Kind::Leaf {
                let other = key_of(node.number() as u32).to_be_bytes();
                if other == bytes {
                    return false;
                }
                let shared = shared_len(&bytes[depth..], &other[depth..]);
                let fork = depth + shared;
                let joint = self.join(
                    &bytes[depth..fork],
                    [(other[fork], node), (bytes[fork], leaf)],
                );
                self.hang(above, joint);
                return true;
            }
            let header = *self.header(node);
            let shared = shared_len(&bytes[depth..], header.prefix());
            if shared < header.prefix().len() {
                let (before, after) = header.prefix().split_at(shared);
                self.header_mut(node).set_prefix(&after[1..]);
                let joint = self.join(before, [(after[0], node), (bytes[depth + shared], leaf)]);
                self.hang(above, joint);
                return true;
            }
            depth += shared;
            let child = self.child(node, bytes[depth]);
            if child == Ref::NONE {
                let grown = self.add(node, bytes[depth], leaf);
                if grown != node {
                    self.hang(above, grown);
                }
                return true;
            }
            above = Some((node, bytes[depth]));
            node = child;
            depth += 1;
        }
    }

    /// Forgets `key`; the number that was kept for it.
    pub(super) fn remove(&mut self, key: u64, key_of: impl Fn(u32) -> u64) -> Option<u32> {
        let bytes = key.to_be_bytes();
        let mut above = None;
        let mut parent = None;
        let mut node = self.root;
        let mut depth = 0;
        while node != Ref::NONE && node.kind() != Kind::Leaf {
            let prefix = self.header(node).prefix();
            if !bytes[depth..].starts_with(prefix) {
                return None;
            }
            depth += prefix.len();
            above = parent;
            parent = Some((node, bytes[depth]));
            node = self.child(node, bytes[depth]);
            depth += 1;
        }
        if node == Ref::NONE || key_of(node.number() as u32) != key {
            return None;
        }
        match parent {
            None => self.root = Ref::NONE,
            Some((inner, byte)) => {
                let shrunk = self.cut(inner, byte);
                if shrunk != inner {
                    self.hang(above, shrunk);
                }
            }
        }
        Some(node.number() as u32)
    }

    /// Nodes in use, by kind.
    #[cfg(all(test, not(loom)))]
    pub(super) fn nodes(&self) -> [usize; 4] {
        [
            self.node4.live(),
            self.node16.live(),
            self.node48.live(),
            self.node256.live(),
        ]
    }

    pub(super) fn bytes(&self) -> usize {
        self.node4.bytes()
            + self.node16.bytes()
            + self.node48.bytes()
            + self.node256.bytes()
            + self.node256.live() * size_of::<Node256>()
    }

    #[inline]
    fn header(&self, node: Ref) -> &Header {
        match node.kind() {
            Kind::Leaf => unreachable!("a leaf has no header"),
            Kind::Node4 => &self.node4.nodes[node.number()].header,
            Kind::Node16 => &self.node16.nodes[node.number()].header,
            Kind::Node48 => &self.node48.nodes[node.number()].header,
            Kind::Node256 => &self.node256.nodes[node.number()].header,
        }
    }

    fn header_mut(&mut self, node: Ref) -> &mut Header {
        match node.kind() {
            Kind::Leaf => unreachable!("a leaf has no header"),
            Kind::Node4 => &mut self.node4.nodes[node.number()].header,
            Kind::Node16 => &mut self.node16.nodes[node.number()].header,
            Kind::Node48 => &mut self.node48.nodes[node.number()].header,
            Kind::Node256 => &mut self.node256.nodes[node.number()].header,
        }
    }

    /// The child under `byte`, or `NONE`.
    #[inline]
    fn child(&self, node: Ref, byte: u8) -> Ref {
        match node.kind() {
            Kind::Leaf => Ref::NONE,
            Kind::Node4 => {
                let node = &self.node4.nodes[node.number()];
                node.position(byte)
                    .map_or(Ref::NONE, |at| node.children[at])
            }
            Kind::Node16 => {
                let node = &self.node16.nodes[node.number()];
                node.position(byte)
                    .map_or(Ref::NONE, |at| node.children[at])
            }
            Kind::Node48 => {
                let node = &self.node48.nodes[node.number()];
                match node.index[usize::from(byte)] {
                    0 => Ref::NONE,
                    at => node.children[usize::from(at) - 1],
                }
            }
            Kind::Node256 => self.node256.nodes[node.number()].children[usize::from(byte)],
        }
    }

    /// Puts `node` where `above` points to, in place of what is there.
    fn hang(&mut self, above: Option<(Ref, u8)>, node: Ref) {
        const MISSING: &str = "the way here led through this child";
        let Some((parent, byte)) = above else {
            self.root = node;
            return;
        };
        let number = parent.number();
        match parent.kind() {
            Kind::Leaf => unreachable!("a leaf has no children"),
            Kind::Node4 => {
                let parent = &mut self.node4.nodes[number];
                let at = parent.position(byte).expect(MISSING);
                parent.children[at] = node;
            }
            Kind::Node16 => {
                let parent = &mut self.node16.nodes[number];
                let at = parent.position(byte).expect(MISSING);
                parent.children[at] = node;
            }
            Kind::Node48 => {
                let parent = &mut self.node48.nodes[number];
                let at = usize::from(parent.index[usize::from(byte)]);
                parent.children[at - 1] = node;
            }
            Kind::Node256 => self.node256.nodes[number].children[usize::from(byte)] = node,
        }
    }

    /// A new node with a prefix and two children.
    fn join(&mut self, prefix: &[u8], children: [(u8, Ref); 2]) -> Ref {
        let mut joint = Short::EMPTY;
        joint.header.set_prefix(prefix);
        for (byte, child) in children {
            joint.push(byte, child);
        }
        Ref::new(Kind::Node4, self.node4.insert(joint))
    }

    /// Adds a child; the node it is in then, a larger one where this was full.
    fn add(&mut self, node: Ref, byte: u8, child: Ref) -> Ref {
        let number = node.number();
        match node.kind() {
            Kind::Leaf => unreachable!("a leaf has no children"),
            Kind::Node4 => {
                let small = &mut self.node4.nodes[number];
                if usize::from(small.header.children) < 4 {
                    small.push(byte, child);
                    return node;
                }
                let mut large = Short::EMPTY;
                small.pairs().for_each(|(b, c)| large.push(b, c));
                copy_prefix(&mut large.header, &small.header);
                large.push(byte, child);
                self.node4.remove(number);
                Ref::new(Kind::Node16, self.node16.insert(large))
            }
            Kind::Node16 => {
                let small = &mut self.node16.nodes[number];
                if usize::from(small.header.children) < 16 {
                    small.push(byte, child);
                    return node;
                }
                let mut large = Node48::EMPTY;
                small.pairs().for_each(|(b, c)| large.push(b, c));
                copy_prefix(&mut large.header, &small.header);
                large.push(byte, child);
                self.node16.remove(number);
                Ref::new(Kind::Node48, self.node48.insert(large))
            }
            Kind::Node48 => {
                let small = &mut self.node48.nodes[number];
                if usize::from(small.header.children) < 48 {
                    small.push(byte, child);
                    return node;
                }
                let mut large = Box::new(Node256::EMPTY);
                for (b, c) in small.pairs() {
                    large.children[usize::from(b)] = c;
                }
                copy_prefix(&mut large.header, &small.header);
                large.children[usize::from(byte)] = child;
                large.header.children = 49;
                self.node48.remove(number);
                Ref::new(Kind::Node256, self.node256.insert(large))
            }
            Kind::Node256 => {
                let node256 = &mut self.node256.nodes[number];
                node256.children[usize::from(byte)] = child;
                node256.header.children += 1;
                node
            }
        }
    }

    /// Removes the child under `byte`; what stands in the node's place then. A node shrinks well below the size at
    /// which it grew, so that one key coming and going does not copy it each time.
    fn cut(&mut self, node: Ref, byte: u8) -> Ref {
        const MISSING: &str = "the way here led through this child";
        let number = node.number();
        match node.kind() {
            Kind::Leaf => unreachable!("a leaf has no children"),
            Kind::Node4 => {
                let small = &mut self.node4.nodes[number];
                small.remove(small.position(byte).expect(MISSING));
                if small.header.children > 1 {
                    return node;
                }
                let (header, byte, only) = (small.header, small.keys[0], small.children[0]);
                self.node4.remove(number);
                if only.kind() != Kind::Leaf {
                    self.lengthen(only, header.prefix(), byte);
                }
                only
            }
            Kind::Node16 => {
                let large = &mut self.node16.nodes[number];
                large.remove(large.position(byte).expect(MISSING));
                if large.header.children > 3 {
                    return node;
                }
                let mut small = Short::EMPTY;
                large.pairs().for_each(|(b, c)| small.push(b, c));
                copy_prefix(&mut small.header, &large.header);
                self.node16.remove(number);
                Ref::new(Kind::Node4, self.node4.insert(small))
            }
            Kind::Node48 => {
                let large = &mut self.node48.nodes[number];
                let at = core::mem::take(&mut large.index[usize::from(byte)]);
                large.children[usize::from(at) - 1] = Ref::NONE;
                large.header.children -= 1;
                if large.header.children > 12 {
                    return node;
                }
                let mut small = Short::EMPTY;
                large.pairs().for_each(|(b, c)| small.push(b, c));
                copy_prefix(&mut small.header, &large.header);
                self.node48.remove(number);
                Ref::new(Kind::Node16, self.node16.insert(small))
            }
            Kind::Node256 => {
                let large = &mut self.node256.nodes[number];
                large.children[usize::from(byte)] = Ref::NONE;
                large.header.children -= 1;
                if large.header.children > 36 {
                    return node;
                }
                let mut small = Node48::EMPTY;
                large.pairs().for_each(|(b, c)| small.push(b, c));
                copy_prefix(&mut small.header, &large.header);
                self.node256.remove(number);
                Ref::new(Kind::Node48, self.node48.insert(small))
            }
        }
    }

    /// Puts `above` and `byte` before a node's own prefix: the node between is gone.
    fn lengthen(&mut self, node: Ref, above: &[u8], byte: u8) {
        let header = self.header_mut(node);
        let own = *header;
        let mut whole = [0; KEY_BYTES];
        let bytes = above.iter().chain([&byte]).chain(own.prefix());
        let mut len = 0;
        for (to, &from) in whole.iter_mut().zip(bytes) {
            *to = from;
            len += 1;
        }
        header.set_prefix(&whole[..len]);
    }
}

fn copy_prefix(to: &mut Header, from: &Header) {
    to.prefix = from.prefix;
    to.prefix_len = from.prefix_len;
}

/// How many bytes two slices share at their start.
fn shared_len(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Keys that fork at every depth and fill nodes of every size.
    fn a_key() -> impl Strategy<Value = u64> {
        prop_oneof![
            (0u64..400).prop_map(|low| low << 12 | 5),
            (0u64..300, 0u32..8).prop_map(|(byte, at)| (byte & 0xff) << (at * 8)),
            (0u64..60, 0u64..60).prop_map(|(a, b)| a << 32 | b << 16),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn agrees_with_a_btree_map(ops in proptest::collection::vec((a_key(), 0u8..3), 1..1500)) {
            let mut art = Art::EMPTY;
            let mut keys: Vec<u64> = Vec::new();
            let mut model: BTreeMap<u64, u32> = BTreeMap::new();
            for (key, op) in ops {
                // Twice as many insertions as removals: trees get large, and every one is emptied in the end.
                if op < 2 {
                    let number = keys.len() as u32;
                    keys.push(key);
                    let is_new = art.insert(key, number, |n| keys[n as usize]);
                    prop_assert_eq!(is_new, !model.contains_key(&key));
                    model.entry(key).or_insert(number);
                } else {
                    prop_assert_eq!(art.remove(key, |n| keys[n as usize]), model.remove(&key));
                }
                prop_assert_eq!(art.get(key, |n| keys[n as usize]), model.get(&key).copied());
            }
            for (&key, &number) in &model {
                prop_assert_eq!(art.get(key, |n| keys[n as usize]), Some(number));
            }
            for (key, number) in model {
                prop_assert_eq!(art.remove(key, |n| keys[n as usize]), Some(number));
            }
            prop_assert_eq!(art.nodes(), [0; 4]);
            prop_assert_eq!(art.root, Ref::NONE);
        }
    }

    #[test]
    fn a_node_grows_through_every_kind_and_shrinks_back() {
        let mut art = Art::EMPTY;
        let key_of = |n: u32| u64::from(n) << 12;
        let mut seen = Vec::new();
        for n in 0..256 {
            assert!(art.insert(key_of(n), n, key_of));
            seen.push(art.nodes());
        }
        assert!(seen.contains(&[1, 0, 0, 0]) && art.bytes() > 0);
        for n in 0..256 {
            assert_eq!(art.get(key_of(n), key_of), Some(n));
            assert_eq!(art.remove(key_of(n), key_of), Some(n));
            assert_eq!(art.remove(key_of(n), key_of), None);
        }
        assert_eq!(art.nodes(), [0; 4]);
        // Keys n << 12 fork in two bytes: 16 children above, up to 16 below. Bytes alone fill a 256.
        for n in 0..256 {
            assert!(art.insert(u64::from(n), n, u64::from));
        }
        assert_eq!(art.nodes(), [0, 0, 0, 1]);
    }
}
