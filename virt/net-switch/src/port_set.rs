//! Port identifiers and sets of ports.

use crate::MAX_PORTS;

/// Identifier of a port in its switch. It is reused once the port has been removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub(crate) u8);

impl PortId {
    /// Returns its number, below [`MAX_PORTS`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Set of ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSet([u64; MAX_PORTS / 64]);

impl PortSet {
    /// Creates the set of this port alone.
    pub fn of(port: PortId) -> Self {
        let mut set = Self::default();
        set.insert(port);
        set
    }

    /// Adds a port.
    pub fn insert(&mut self, port: PortId) {
        self.0[port.index() / 64] |= 1 << (port.index() % 64);
    }

    /// Removes a port.
    pub fn remove(&mut self, port: PortId) {
        self.0[port.index() / 64] &= !(1 << (port.index() % 64));
    }

    /// Whether a port is in it.
    pub fn contains(&self, port: PortId) -> bool {
        self.0[port.index() / 64] >> (port.index() % 64) & 1 != 0
    }

    /// Whether no port is in it.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; MAX_PORTS / 64]
    }

    /// Returns the number of ports in it.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the ports in it, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = PortId> + use<> {
        let words = self.0;
        words.into_iter().enumerate().flat_map(|(nth, word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros())?;
                rest &= rest - 1;
                Some(PortId((nth * 64) as u8 + bit as u8))
            })
        })
    }
}
