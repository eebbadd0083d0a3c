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
