//! Loading from made-up files into real guest RAM.

use std::io::Write;

use guest_mem::{Gpa, PhysMem};

use super::*;

const MEMORY: u64 = 64 << 20;

fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file
}

/// Returns a bzImage of one setup sector and `body`, protocol 2.12, 64-bit.
fn bzimage(body: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20cu16.to_le_bytes());
    image[0x211] = 1;
    image[0x214..0x218].copy_from_slice(&0x10_0000u32.to_le_bytes());
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    image[0x236..0x238].copy_from_slice(&1u16.to_le_bytes());
    image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
    image[0x260..0x264].copy_from_slice(&0x80_0000u32.to_le_bytes());
    image.extend_from_slice(body);
    image
}

fn read(ram: &GuestRam, gpa: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ram.read(Gpa::new(gpa), &mut bytes).unwrap();
    bytes
}

fn payload<'a>(kernel: &'a File, initrd: Option<&'a File>, cmdline: &'a str) -> Payload<'a> {
    Payload {
        kernel: (kernel, KernelKind::BzImage),
        initrd,
        cmdline,
        memory: MEMORY,
        acpi: b"RSD PTR ",
    }
}

fn ram() -> GuestRam {
    GuestRam::new(&[(Gpa::new(0), MEMORY)]).unwrap()
}

#[test]
fn a_bzimage_lands_at_one_mib_with_params_command_line_and_initrd() {
    let (kernel, initrd, ram) = (file(&bzimage(b"KERNEL")), file(&[7; 5000]), ram());
    let entry = load(&ram, &payload(&kernel, Some(&initrd), "console=ttyS0")).unwrap();
    assert_eq!(entry, Entry::Linux64(0x10_0200));
    assert_eq!(read(&ram, 0x10_0000, 6), b"KERNEL");
    assert_eq!(read(&ram, layout::BOOT_CMDLINE, 14), b"console=ttyS0\0");
    assert_eq!(read(&ram, layout::ACPI_RSDP, 8), b"RSD PTR ");
    assert_eq!(
        read(&ram, 0xf_fff0, 6),
        [0xba, 0x02, 0x06, 0xb0, 0x0f, 0xee]
    );
    let params = read(&ram, layout::BOOT_PARAMS, 4096);
    let word = |at: usize| u32::from_le_bytes(params[at..at + 4].try_into().unwrap());
    let at = (MEMORY - 5000) as u32 & !0xfff;
    assert_eq!((word(0x218), word(0x21c)), (at, 5000));
    assert_eq!(word(0x228), layout::BOOT_CMDLINE as u32);
    assert_eq!(word(0x70), layout::ACPI_RSDP as u32);
    assert_eq!(params[0x210], 0xff);
    assert_eq!(usize::from(params[0x1e8]), layout::e820(MEMORY).len());
    assert_eq!(read(&ram, u64::from(at), 5000), [7; 5000]);
}

/// Two regions, as in a machine of more than 3 GiB; memory to which nothing is loaded keeps its
/// content.
#[test]
fn memory_without_a_file_gets_the_same() {
    let regions = [(Gpa::new(0), MEMORY), (Gpa::new(1 << 32), 4 << 20)];
    let anonymous = GuestRam::anonymous(&regions, guest_mem::HugePages::Never).unwrap();
    anonymous.write(Gpa::new(0x8_0000), b"mine").unwrap();
    let (kernel, initrd, ram) = (file(&bzimage(b"KERNEL")), file(&[7; 3 << 20]), ram());
    for ram in [&anonymous, &ram] {
        load(ram, &payload(&kernel, Some(&initrd), "console=ttyS0")).unwrap();
    }
    assert_eq!(read(&anonymous, 0x8_0000, 4), b"mine");
    anonymous.write(Gpa::new(0x8_0000), &[0; 4]).unwrap();
    let of = |ram| read(ram, 0, MEMORY as usize);
    assert!(of(&anonymous) == of(&ram));
    assert_eq!(read(&anonymous, 1 << 32, 4 << 20), vec![0; 4 << 20]);
}

#[test]
fn an_initrd_over_the_kernels_own_room_is_refused() {
    let (kernel, initrd) = (file(&bzimage(b"K")), file(&[]));
    // Preferred address 16 MiB and 8 MiB to unpack: 40 MiB are left of 64.
    initrd.set_len(41 << 20).unwrap();
    let error = load(&ram(), &payload(&kernel, Some(&initrd), "")).unwrap_err();
    assert!(matches!(error, BootError::NoRoom { .. }), "{error}");
}

#[test]
fn command_lines_that_are_too_long_or_not_ascii_are_refused() {
    let kernel = file(&bzimage(b"K"));
    for cmdline in ["x".repeat(4096), "smörgås".to_owned()] {
        let error = load(&ram(), &payload(&kernel, None, &cmdline)).unwrap_err();
        assert!(matches!(error, BootError::Cmdline(_)), "{error}");
    }
}

#[test]
fn kinds_are_recognised_by_magic_numbers() {
    let kind = |content: &[u8]| kernel_kind(&mut file(content)).unwrap();
    assert_eq!(kind(&bzimage(b"")), Some(KernelKind::BzImage));
    assert_eq!(kind(b"\x7fELF\x02\x01\x01"), Some(KernelKind::Elf));
    assert_eq!(kind(b"\x7fELF\x01"), None);
    assert_eq!(kind(b""), None);
    let mut old = bzimage(b"");
    old[0x206] = 0x0b;
    assert_eq!(kind(&old), None, "before xloadflags");
    let mut short = bzimage(b"");
    short[0x236] = 0;
    assert_eq!(kind(&short), None, "no 64-bit entry");
}

/// The header counts the 16-byte units after the setup sectors, of which 0 means 4.
#[test]
fn a_bzimage_shorter_than_its_header_says_is_refused() {
    for (sectors, setup) in [(1u8, 2 * 512), (0, 5 * 512), (27, 28 * 512u64)] {
        let mut image = bzimage(b"");
        image[0x1f1] = sectors;
        image[0x1f4..0x1f8].copy_from_slice(&0x300u32.to_le_bytes());
        let needs = setup + 0x3000;
        for (has, is_whole) in [(needs + 1, true), (needs, true), (needs - 1, false)] {
            image.resize(has as usize, 0x90);
            let checked = kernel_kind(&mut file(&image));
            match (is_whole, checked) {
                (true, Ok(Some(KernelKind::BzImage))) => {}
                (false, Err(BootError::Truncated { has: h, needs: n })) => {
                    assert_eq!((h, n), (has, needs));
                }
                (_, checked) => panic!("{sectors} sectors, {has} bytes: {checked:?}"),
            }
        }
    }
}

#[test]
fn a_truncated_kernel_is_an_error() {
    let kernel = file(&bzimage(b"K")[..1000]);
    assert!(load(&ram(), &payload(&kernel, None, "")).is_err());
    let elf = file(b"\x7fELF\x02\x01\x01");
    let mut payload = payload(&elf, None, "");
    payload.kernel.1 = KernelKind::Elf;
    assert!(load(&ram(), &payload).is_err());
}
