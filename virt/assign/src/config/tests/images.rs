//! Configuration spaces of the lab's devices, as QEMU 10 lays them out and VFIO reads them, written
//! down by hand.

/// A configuration space being written.
#[derive(Clone)]
pub struct Image(pub Vec<u8>);

impl Image {
    /// A space of `len` bytes without a capability.
    pub fn new(len: usize, (vendor, device): (u16, u16), class_and_revision: u32) -> Self {
        let mut image = Self(vec![0; len]);
        image.word(0x00, u32::from(device) << 16 | u32::from(vendor));
        // Memory decoding on; INTx is not asserted.
        image.word(0x04, 0x0000_0002);
        image.word(0x08, class_and_revision);
        image.word(0x2c, 0x1100_1af4);
        image
    }

    /// Writes the word at `at`.
    pub fn word(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Writes words from `at` on.
    pub fn words(&mut self, at: usize, values: &[u32]) {
        for (index, value) in values.iter().enumerate() {
            self.word(at + 4 * index, *value);
        }
    }

    /// Says that there is a list of capabilities, and where it begins.
    pub fn list_from(&mut self, at: u8) {
        self.0[0x06] |= 0x10;
        self.0[0x34] = at;
    }

    /// A standard capability at the head of the list, with `body` behind id and link.
    pub fn prepend(&mut self, at: u8, id: u8, body: &[u8]) {
        let next = self.0[0x34];
        self.list_from(at);
        let at = usize::from(at);
        self.0[at..at + 2].copy_from_slice(&[id, next]);
        self.0[at + 2..at + 2 + body.len()].copy_from_slice(body);
    }
}

/// `nvme`: 65 vectors, table and pending bits behind the registers in BAR 0, Express, power
/// management.
pub fn nvme() -> Image {
    let mut image = Image::new(4096, (0x1b36, 0x0010), 0x0108_0202);
    image.word(0x10, 0xfebf_0004);
    image.word(0x3c, 0x0000_010b);
    image.list_from(0x40);
    image.words(0x40, &[0x0040_8011, 0x2000, 0x3000]);
    // Endpoint of version 2 with a link, which the guest must not see; FLR; in status a corrected
    // error and pending transactions.
    image.words(
        0x80,
        &[
            0x0002_6010,
            0x1000_8fe0,
            0x0021_2810,
            0x0040_0c11,
            0x1011_0000,
            0,
            0,
            0,
            0,
            0x0000_001f,
            0x0000_0008,
            0x0000_0002,
            0x0000_0001,
        ],
    );
    image.words(0x60, &[0xc843_0001, 0x0000_0008]);
    image
}

/// Sizes of the BARs of [`nvme`].
pub const NVME_BARS: [u64; 6] = [0x4000, 0, 0, 0, 0, 0];

/// `virtio-net-pci`, modern: five vendor-specific capabilities, MSI-X in BAR 1, registers in BAR 4.
pub fn virtio_net() -> Image {
    let mut image = Image::new(256, (0x1af4, 0x1041), 0x0200_0001);
    image.word(0x14, 0xfebf_1000);
    image.words(0x20, &[0xfe00_000c, 0x0000_0000]);
    image.word(0x30, 0xfeb0_0000);
    image.word(0x3c, 0x0000_010a);
    image.list_from(0x98);
    image.words(0x98, &[0x0003_8411, 0x0000_0001, 0x0000_0801]);
    image.words(0x84, &[0x0514_7009, 0, 0, 0, 0]);
    image.words(0x70, &[0x0214_6009, 4, 0x3000, 0x1000, 4]);
    image.words(0x60, &[0x0410_5009, 4, 0x2000, 0x1000]);
    image.words(0x50, &[0x0310_4009, 4, 0x1000, 0x1000]);
    image.words(0x40, &[0x0110_0009, 4, 0x0000, 0x1000]);
    image
}

/// Sizes of the BARs of [`virtio_net`].
pub const VIRTIO_NET_BARS: [u64; 6] = [0, 0x1000, 0, 0, 0x4000, 0];

/// `edu`: MSI with one vector and 64-bit addresses, and a legacy pin.
pub fn edu() -> Image {
    let mut image = Image::new(256, (0x1234, 0x11e8), 0x00ff_0010);
    image.word(0x10, 0xfea0_0000);
    image.word(0x3c, 0x0000_010b);
    image.list_from(0x40);
    image.words(0x40, &[0x0080_0005, 0, 0, 0]);
    image
}

/// Sizes of the BARs of [`edu`].
pub const EDU_BARS: [u64; 6] = [0x10_0000, 0, 0, 0, 0, 0];
