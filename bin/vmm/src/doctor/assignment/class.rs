//! Names of PCI classes (PCI Code and ID Assignment Specification), as far as machines have them.

/// Class and subclass, with a name.
const SUBCLASSES: [(u32, &str); 24] = [
    (0x0101, "IDE controller"),
    (0x0104, "RAID controller"),
    (0x0106, "SATA controller"),
    (0x0107, "SAS controller"),
    (0x0108, "NVMe controller"),
    (0x0200, "Ethernet controller"),
    (0x0207, "InfiniBand controller"),
    (0x0280, "network controller"),
    (0x0300, "VGA controller"),
    (0x0302, "3D controller"),
    (0x0401, "audio device"),
    (0x0403, "audio device"),
    (0x0500, "memory"),
    (0x0600, "host bridge"),
    (0x0601, "ISA bridge"),
    (0x0604, "PCI bridge"),
    (0x0700, "serial port"),
    (0x0806, "IOMMU"),
    (0x0c03, "USB controller"),
    (0x0c05, "SMBus controller"),
    (0x0d11, "Bluetooth controller"),
    (0x1000, "encryption device"),
    (0x1180, "signal processor"),
    (0x1200, "accelerator"),
];

/// Names of classes without their subclass.
const CLASSES: [&str; 19] = [
    "device of before classes",
    "storage controller",
    "network controller",
    "display controller",
    "multimedia device",
    "memory",
    "bridge",
    "communication device",
    "system device",
    "input device",
    "docking station",
    "processor",
    "serial bus controller",
    "wireless controller",
    "intelligent controller",
    "satellite controller",
    "encryption device",
    "signal processor",
    "accelerator",
];

/// Returns the name of a class code: class, subclass and interface, 8 bits each.
pub fn name(class: u32) -> &'static str {
    let known = SUBCLASSES.iter().find(|(code, _)| *code == class >> 8);
    let whole = || CLASSES.get((class >> 16) as usize).copied();
    known
        .map(|(_, name)| *name)
        .or_else(whole)
        .unwrap_or("device of no known class")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_has_the_name_of_its_subclass_or_its_own() {
        for (class, words) in [
            (0x01_08_02, "NVMe controller"),
            (0x02_00_00, "Ethernet controller"),
            (0x01_7f_00, "storage controller"),
            (0x12_00_00, "accelerator"),
            (0xff_00_00, "device of no known class"),
            (u32::MAX, "device of no known class"),
        ] {
            assert_eq!(name(class), words, "{class:06x}");
        }
    }
}
