//! Nodes of the tree, references to them, and the arenas they lie in.

use alloc::vec::Vec;

/// Bytes of a key, most significant first: pages that lie together share their path.
pub(super) const KEY_BYTES: usize = 8;

/// A leaf, or a node of one of the arenas: the kind in the three highest bits, the number below.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ref(u32);

const KIND_SHIFT: u32 = 29;
const NUMBER: u32 = (1 << KIND_SHIFT) - 1;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Leaf,
    Node4,
    Node16,
    Node48,
    Node256,
}

impl Ref {
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) fn new(kind: Kind, number: usize) -> Self {
        assert!(number < NUMBER as usize, "fewer than 2^29 nodes of a kind");
        Self((kind as u32) << KIND_SHIFT | number as u32)
    }

    #[inline]
    pub(super) fn kind(self) -> Kind {
        match self.0 >> KIND_SHIFT {
            0 => Kind::Leaf,
            1 => Kind::Node4,
            2 => Kind::Node16,
            3 => Kind::Node48,
            _ => Kind::Node256,
        }
    }

    #[inline]
    pub(super) fn number(self) -> usize {
        (self.0 & NUMBER) as usize
    }
}

/// Fields that every inner node has.
#[derive(Clone, Copy, Default)]
pub(super) struct Header {
    /// Bytes that all keys below share after those above, `prefix_len` of them.
    pub(super) prefix: [u8; KEY_BYTES],
    pub(super) prefix_len: u8,
    pub(super) children: u16,
}

impl Header {
    pub(super) fn prefix(&self) -> &[u8] {
        &self.prefix[..usize::from(self.prefix_len)]
    }

    pub(super) fn set_prefix(&mut self, bytes: &[u8]) {
        self.prefix[..bytes.len()].copy_from_slice(bytes);
        self.prefix_len = bytes.len() as u8;
    }
}

/// Up to `N` children, `keys[i]` leading to `children[i]`, in no order.
pub(super) struct Short<const N: usize> {
    pub(super) header: Header,
    pub(super) keys: [u8; N],
    pub(super) children: [Ref; N],
}

impl<const N: usize> Short<N> {
    pub(super) const EMPTY: Self = Self {
        header: Header {
            prefix: [0; KEY_BYTES],
            prefix_len: 0,
            children: 0,
        },
        keys: [0; N],
        children: [Ref::NONE; N],
    };

    #[inline]
    pub(super) fn position(&self, byte: u8) -> Option<usize> {
        let len = usize::from(self.header.children);
        self.keys[..len].iter().position(|&key| key == byte)
    }

    pub(super) fn push(&mut self, byte: u8, child: Ref) {
        let len = usize::from(self.header.children);
        self.keys[len] = byte;
        self.children[len] = child;
        self.header.children += 1;
    }

    pub(super) fn remove(&mut self, at: usize) {
        let last = usize::from(self.header.children) - 1;
        self.keys[at] = self.keys[last];
        self.children[at] = self.children[last];
        self.header.children -= 1;
    }

    pub(super) fn pairs(&self) -> impl Iterator<Item = (u8, Ref)> + '_ {
        let len = usize::from(self.header.children);
        self.keys[..len]
            .iter()
            .copied()
            .zip(self.children[..len].iter().copied())
    }
}

/// Up to 48 children: `index[byte]` is the child's position plus one.
pub(super) struct Node48 {
    pub(super) header: Header,
    pub(super) index: [u8; 256],
    pub(super) children: [Ref; 48],
}

impl Node48 {
    pub(super) const EMPTY: Self = Self {
        header: Short::<4>::EMPTY.header,
        index: [0; 256],
        children: [Ref::NONE; 48],
    };

    pub(super) fn push(&mut self, byte: u8, child: Ref) {
        let free = self.children.iter().position(|&c| c == Ref::NONE);
        let at = free.expect("a full node grows first");
        self.index[usize::from(byte)] = at as u8 + 1;
        self.children[at] = child;
        self.header.children += 1;
    }

    pub(super) fn pairs(&self) -> impl Iterator<Item = (u8, Ref)> + '_ {
        let used = (0..=255u8).zip(self.index).filter(|&(_, at)| at != 0);
        used.map(|(byte, at)| (byte, self.children[usize::from(at) - 1]))
    }
}

/// A child for every byte.
pub(super) struct Node256 {
    pub(super) header: Header,
    pub(super) children: [Ref; 256],
}

impl Node256 {
    pub(super) const EMPTY: Self = Self {
        header: Short::<4>::EMPTY.header,
        children: [Ref::NONE; 256],
    };

    pub(super) fn pairs(&self) -> impl Iterator<Item = (u8, Ref)> + '_ {
        let used = (0..=255u8).zip(self.children);
        used.filter(|&(_, child)| child != Ref::NONE)
    }
}

/// Nodes of one kind. What was removed is used again; memory is not given back.
pub(super) struct Arena<T> {
    pub(super) nodes: Vec<T>,
    free: Vec<u32>,
}

impl<T> Arena<T> {
    pub(super) const EMPTY: Self = Self {
        nodes: Vec::new(),
        free: Vec::new(),
    };

    pub(super) fn insert(&mut self, node: T) -> usize {
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

    pub(super) fn remove(&mut self, number: usize) {
        self.free.push(number as u32);
    }

    pub(super) fn live(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<T>() + self.free.capacity() * size_of::<u32>()
    }
}
