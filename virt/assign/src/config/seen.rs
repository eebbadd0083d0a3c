//! Table of the capabilities that a guest sees, and their treatment.
//!
//! Capabilities that are not in the table are hidden.

/// Treatment of one capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Shown as a root complex integrated endpoint without a link; device control is storage.
    Express,
    /// Shown; enable, address, data and mask bits are the guest's, and reach the device by the
    /// function alone.
    Msi,
    /// Shown where the device has it; enable and function mask are the guest's.
    Msix,
    /// Shown with D0 and D3hot, and without power management events; the state is storage.
    Power,
    /// Shown as read when the device was opened, read only.
    ReadOnly,
    /// Serial number: shown as read when the device was opened, read only.
    Serial,
    /// Hidden, for this reason.
    Hidden(&'static str),
}

/// List that a capability is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The conventional space: ids of 8 bits, from the pointer at 0x34.
    Standard,
    /// The extended space: ids of 16 bits, from 0x100.
    Extended,
}

/// One row of [`SEEN`].
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// List it is in.
    pub space: Space,
    /// Capability id.
    pub id: u16,
    /// Name.
    pub name: &'static str,
    /// Document and section. Without a document: PCI Express Base 4.0.
    pub section: &'static str,
    /// Treatment.
    pub treatment: Treatment,
}

const LINK: &str = "belongs to a link or port, which a function on a root bus does not have";
const ATS: &str = "a device that translates by itself passes by the unit, which has no device TLB";
const HOST: &str = "the host handles it";
const SIZE: &str = "would change sizes of BARs that are fixed";

const fn row(
    space: Space,
    id: u16,
    name: &'static str,
    section: &'static str,
    treatment: Treatment,
) -> Row {
    Row {
        space,
        id,
        name,
        section,
        treatment,
    }
}

const fn standard(id: u16, name: &'static str, section: &'static str, what: Treatment) -> Row {
    row(Space::Standard, id, name, section, what)
}

const fn extended(id: u16, name: &'static str, section: &'static str, what: Treatment) -> Row {
    row(Space::Extended, id, name, section, what)
}

use Treatment::{Express, Hidden, Msi, Msix, Power, ReadOnly, Serial};

/// Capabilities that are known, by list and id.
pub const SEEN: &[Row] = &[
    standard(0x00, "null", "§7.9", Hidden("an empty place in the list")),
    standard(0x01, "power management", "§7.5.2", Power),
    standard(0x02, "AGP", "PCI Local Bus 3.0 H", Hidden("obsolete")),
    // Reading it takes a write to the device, and a write of data outlives the guest in the
    // device's memory.
    standard(
        0x03,
        "vital product data",
        "§7.9",
        Hidden("reading it needs writes to the device, and writes outlive the guest"),
    ),
    standard(
        0x04,
        "slot identification",
        "PCI Local Bus 3.0 H",
        Hidden(LINK),
    ),
    standard(0x05, "MSI", "§7.7.1", Msi),
    standard(
        0x06,
        "CompactPCI hot swap",
        "PCI Local Bus 3.0 H",
        Hidden(LINK),
    ),
    standard(0x07, "PCI-X", "PCI-X 2.0", Hidden("obsolete")),
    standard(0x08, "HyperTransport", "PCI Local Bus 3.0 H", Hidden(LINK)),
    // Virtio drivers find their registers by it. Read only also where virtio has a window to write
    // through (`VIRTIO_PCI_CAP_PCI_CFG`): that reaches BARs without a trap.
    standard(0x09, "vendor-specific", "§7.9.4", ReadOnly),
    standard(
        0x0a,
        "debug port",
        "PCI Local Bus 3.0 H",
        Hidden("a path into the host's bus"),
    ),
    standard(0x0c, "hot plug", "PCI Local Bus 3.0 H", Hidden(LINK)),
    standard(
        0x0d,
        "bridge subsystem ids",
        "PCI-to-PCI Bridge 1.2",
        Hidden(LINK),
    ),
    standard(0x10, "PCI Express", "§7.5.3", Express),
    standard(0x11, "MSI-X", "§7.7.2", Msix),
    standard(
        0x12,
        "SATA",
        "Serial ATA 2.6",
        Hidden("its registers are an I/O BAR's"),
    ),
    standard(
        0x13,
        "advanced features",
        "§7.9",
        Hidden("resets the device without the function"),
    ),
    standard(0x14, "enhanced allocation", "§7.8", Hidden(SIZE)),
    // The host has some as this, for those it does not show itself.
    extended(0x0000, "null", "§7.9", Hidden("an empty place in the list")),
    extended(0x0001, "advanced error reporting", "§7.8", Hidden(HOST)),
    extended(0x0002, "virtual channel", "§7.9", Hidden(LINK)),
    extended(0x0003, "device serial number", "§7.9.3", Serial),
    extended(0x0004, "power budgeting", "§7.8", Hidden(HOST)),
    extended(
        0x0008,
        "multi-function virtual channel",
        "§7.9",
        Hidden(LINK),
    ),
    extended(0x0009, "virtual channel", "§7.9", Hidden(LINK)),
    extended(
        0x000b,
        "vendor-specific",
        "§7.9",
        Hidden("of unknown effect"),
    ),
    extended(0x000d, "access control services", "§7.7", Hidden(HOST)),
    extended(
        0x000e,
        "ARI",
        "§7.8",
        Hidden("names the next function of the host's slot"),
    ),
    extended(0x000f, "ATS", "§10.5", Hidden(ATS)),
    extended(
        0x0010,
        "SR-IOV",
        "§9.3",
        Hidden("makes functions on the host's bus"),
    ),
    extended(0x0012, "multicast", "§7.9", Hidden(LINK)),
    extended(0x0013, "page request", "§10.5", Hidden(ATS)),
    extended(0x0015, "resizable BAR", "§7.8", Hidden(SIZE)),
    extended(0x0016, "dynamic power allocation", "§7.9", Hidden(HOST)),
    extended(
        0x0017,
        "TPH requester",
        "§7.9",
        Hidden("steers writes into the host's caches"),
    ),
    extended(0x0018, "latency tolerance", "§7.8", Hidden(HOST)),
    extended(0x0019, "secondary PCI Express", "§7.7", Hidden(LINK)),
    extended(0x001b, "PASID", "§7.8", Hidden(ATS)),
    extended(0x001d, "downstream port containment", "§7.9", Hidden(LINK)),
    extended(0x001e, "L1 substates", "§7.8", Hidden(LINK)),
    extended(0x001f, "precision time measurement", "§7.9", Hidden(LINK)),
    extended(
        0x0023,
        "designated vendor-specific",
        "§7.9",
        Hidden("of unknown effect"),
    ),
    extended(0x0024, "VF resizable BAR", "§9.3", Hidden(SIZE)),
    extended(0x0025, "data link feature", "§7.7", Hidden(LINK)),
    extended(0x0026, "physical layer 16 GT/s", "§7.7", Hidden(LINK)),
    extended(0x0027, "lane margining", "§7.7", Hidden(LINK)),
];

/// Treatment of the capability `id`; unknown ones are hidden.
pub fn treatment(space: Space, id: u16) -> Treatment {
    SEEN.iter()
        .find(|row| row.space == space && row.id == id)
        .map_or(Hidden("not known"), |row| row.treatment)
}
