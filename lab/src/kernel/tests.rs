use super::*;

#[test]
fn depends_are_found_in_modinfo() {
    assert_eq!(
        depends(b"\x7fELF..\0depends=virtio,virtio-ring\0x"),
        ["virtio", "virtio_ring"]
    );
    assert!(depends(b"..\0depends=\0name=x\0").is_empty());
    assert!(depends(b"nothing").is_empty());
}

#[test]
fn module_names_lose_suffix_and_hyphens() {
    let name = |file: &str| module_name(std::ffi::OsStr::new(file));
    assert_eq!(name("kvm-amd.ko").as_deref(), Some("kvm_amd"));
    assert_eq!(name("tun.ko.xz").as_deref(), Some("tun"));
    assert_eq!(name("modules.builtin"), None);
    assert_eq!(name("a.korn"), None);
}

#[test]
fn dependencies_come_first_and_once_even_in_a_cycle() {
    let dir = std::env::temp_dir().join(format!("lab-modules-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    for (name, text) in [
        ("virtio_blk", "\0depends=virtio,virtio_ring\0"),
        ("virtio", "\0depends=virtio_ring\0"),
        ("virtio_ring", "\0depends=\0"),
        ("odd-a", "\0depends=odd-b\0"),
        ("odd-b", "\0depends=odd-a\0"),
    ] {
        fs::write(dir.join(format!("{name}.ko")), text).unwrap();
    }
    let modules = Modules::below(&dir).unwrap();
    let order = modules
        .in_load_order(&["virtio-blk", "virtio", "odd-a", "builtin"])
        .unwrap();
    let names: Vec<_> = order.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(
        names,
        ["virtio_ring", "virtio", "virtio_blk", "odd_b", "odd_a"]
    );
    assert!(modules.has("odd-a") && !modules.has("builtin"));
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn payload_bounds_come_from_the_header_and_are_checked() {
    let mut image = vec![0; 0x2000];
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x1f1] = 1;
    image[0x248..0x24c].copy_from_slice(&0x10_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&0x20_u32.to_le_bytes());
    image[1024 + 0x10] = 0xab;
    let payload = bzimage_payload(&image).unwrap();
    assert_eq!((payload.len(), payload[0]), (0x20, 0xab));
    image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(bzimage_payload(&image), None);
    assert_eq!(bzimage_payload(b"short"), None);
    assert!(extract_vmlinux(&[0; 4096]).is_err());
}

#[test]
fn a_kernel_names_the_version_of_its_package() {
    let mut image = vec![0; 0x400];
    image[0x202..0x206].copy_from_slice(b"HdrS");
    assert_eq!(version_string(&image), None, "no string");
    image[0x20e..0x210].copy_from_slice(&0x180_u16.to_le_bytes());
    let text = "6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org) #1 SMP PREEMPT_DYNAMIC \
         Debian 6.1.192-2 (2026-11-16)";
    image.splice(0x380.., format!("{text}\0rest").bytes());
    assert_eq!(version_string(&image), Some(text));
    assert_eq!(debian_version(text).as_deref(), Some("6.1.192-2"));
    let backport = "6.12.95+deb12-cloud-amd64 (x@y) #1 SMP Debian 6.12.95-1~bpo12+1 (2026-07-05)";
    assert_eq!(
        debian_version(backport).as_deref(),
        Some("6.12.95-1~bpo12+1")
    );
    let ubuntu = "6.8.0-31-generic (buildd@lcy02) #31-Ubuntu SMP PREEMPT_DYNAMIC";
    assert_eq!(debian_version(ubuntu), None);
    image[0x202] = 0;
    assert_eq!(version_string(&image), None, "no bzImage");
}
