use super::*;

const LOCKED: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t27\nino:\t1234\n\
                          lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:1234 100 101\n";

fn identity(place: &str, mounted: [&str; 2]) -> Identity {
    Identity {
        place: place.to_owned(),
        mounted: mounted.map(str::to_owned).to_vec(),
    }
}

#[test]
fn a_file_is_known_by_its_device_or_by_its_mount() {
    let elsewhere = ["mnt_id:\t99", "ino:\t1234"];
    assert!(identity("fe:00:1234", elsewhere).is_locked_through(LOCKED));
    let other_device = identity("00:2f:1234", ["mnt_id:\t27", "ino:\t1234"]);
    assert!(other_device.is_locked_through(LOCKED));
    assert!(!identity("00:2f:1234", elsewhere).is_locked_through(LOCKED));
    let other_file = identity("fe:00:12345", ["mnt_id:\t27", "ino:\t12345"]);
    assert!(!other_file.is_locked_through(LOCKED));
}

#[test]
fn only_locks_of_images_count() {
    for (line, is_one) in [
        ("lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:1 203 203", true),
        ("lock:\t1: OFDLCK ADVISORY  WRITE -1 fe:00:1 0 EOF", true),
        ("lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:1 0 99", false),
        ("lock:\t1: FLOCK  ADVISORY  WRITE 12 fe:00:1 0 EOF", false),
        ("lock:\t1: POSIX  ADVISORY  READ 12 fe:00:1 100 101", false),
        ("lock:", false),
        ("ino:\t1", false),
    ] {
        assert_eq!(image_lock(line).is_some(), is_one, "{line}");
    }
}

#[test]
fn a_holder_is_printed_in_one_line() {
    let name = "\u{1b}[2J\nx";
    let holder = Holder {
        pid: 1,
        name: printable(name.as_bytes()),
    };
    assert_eq!(holder.to_string(), "?[2J?x (process 1)");
}
