use super::*;

#[test]
fn one_file_gives_the_bytes_worked_out_from_the_format() {
    let bytes = Archive::new().file("a", 0o644, *b"hello").to_bytes();
    let expected = concat!(
        "070701",
        "00000001",
        "000081A4",
        "00000000",
        "00000000",
        "00000001",
        "00000000",
        "00000005",
        "00000000",
        "00000000",
        "00000000",
        "00000000",
        "00000002",
        "00000000",
        "a\0", // 110 + 2 = 112, already a multiple of 4
        "hello\0\0\0",
        "070701",
        "00000000",
        "00000000",
        "00000000",
        "00000000",
        "00000001",
        "00000000",
        "00000000",
        "00000000",
        "00000000",
        "00000000",
        "00000000",
        "0000000B",
        "00000000",
        "TRAILER!!!\0\0\0\0",
    );
    assert_eq!(&bytes[..expected.len()], expected.as_bytes());
    assert_eq!(bytes.len(), 512);
    assert!(bytes[expected.len()..].iter().all(|b| *b == 0));
}

#[test]
fn parents_come_before_children_once_and_in_order() {
    let mut archive = Archive::new();
    archive
        .file("/b/c/d", 0o755, *b"x")
        .file("b//c/a", 0o600, *b"")
        .dir("b");
    let paths: Vec<_> = archive.entries.keys().map(String::as_str).collect();
    assert_eq!(paths, ["b", "b/c", "b/c/a", "b/c/d"]);
    assert_eq!(archive.entries["b"], Entry::Directory);
}

#[test]
fn order_of_insertion_does_not_change_the_bytes() {
    let mut one = Archive::new();
    one.file("x", 0o644, *b"1")
        .symlink("y", "x")
        .char_device("dev/console", 0o600, 5, 1);
    let mut two = Archive::new();
    two.char_device("dev/console", 0o600, 5, 1)
        .symlink("y", "x")
        .file("x", 0o644, *b"1");
    assert_eq!(one.to_bytes(), two.to_bytes());
}

#[test]
fn console_device_carries_its_numbers() {
    let bytes = Archive::new().char_device("c", 0o600, 5, 1).to_bytes();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.starts_with("0707010000000100002180"), "{text}"); // S_IFCHR | 0600 = 0x2180
    assert_eq!(&text[6 + 9 * 8..6 + 11 * 8], "0000000500000001");
}
