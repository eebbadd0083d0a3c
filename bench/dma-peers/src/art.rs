//! An adaptive radix tree over eight-byte keys (Leis et al., ICDE 2013), in safe Rust: nodes of 4,
//! 16, 48 and 256 children in an arena each, referred to by number.
//!
//! A path without branches is compressed into the prefix of the node below it, and a leaf stands
//! for the whole rest of its key. The tree holds numbers only; the key of a number is the caller's
//! to say (`key_of`).

mod node;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;

use node::{Arena, Header, KEY_BYTES, Kind, Node48, Node256, Ref, Short};

/// The tree.
pub(crate) struct Art {
    root: Ref,
    node4: Arena<Short<4>>,
    node16: Arena<Short<16>>,
    node48: Arena<Node48>,
    /// Boxed: the arena moves its nodes when it grows.
    node256: Arena<Box<Node256>>,
}

impl Art {
    pub(crate) const EMPTY: Self = Self {
        root: Ref::NONE,
        node4: Arena::EMPTY,
        node16: Arena::EMPTY,
        node48: Arena::EMPTY,
        node256: Arena::EMPTY,
    };

    /// The number kept for `key`.
    #[inline]
    pub(crate) fn get(&self, key: u64, key_of: impl Fn(u32) -> u64) -> Option<u32> {
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
    pub(crate) fn insert(&mut self, key: u64, number: u32, key_of: impl Fn(u32) -> u64) -> bool {
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
    pub(crate) fn remove(&mut self, key: u64, key_of: impl Fn(u32) -> u64) -> Option<u32> {
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
    #[cfg(test)]
    pub(crate) fn nodes(&self) -> [usize; 4] {
        [
            self.node4.live(),
            self.node16.live(),
            self.node48.live(),
            self.node256.live(),
        ]
    }

    pub(crate) fn bytes(&self) -> usize {
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

    /// Removes the child under `byte`; what stands in the node's place then. A node shrinks well
    /// below the size at which it grew, so that one key coming and going does not copy it each
    /// time.
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

/// Returns the number of bytes that two slices share at their start.
fn shared_len(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
