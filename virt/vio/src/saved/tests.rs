//! Saved state that decoding refuses, and the message.

use serde_json::{Value, json};

use crate::balloon::SavedBalloon;
use crate::blk::SavedBlk;
use crate::net::{Filter, SavedNet};
use crate::saved::{SAVED_VERSION, SavedDevice, SavedState};

fn saved<S: SavedState>(class: S) -> SavedDevice<S> {
    SavedDevice {
        version: SAVED_VERSION,
        device_type: S::TYPE,
        class_version: S::VERSION,
        features: 1 << 32,
        needs_reset: false,
        queues: Vec::new(),
        class,
    }
}

/// Message of decoding `text` as a device whose class's state is `S`, without the place in the
/// text.
fn refusal<S: SavedState>(text: &str) -> String {
    let decoded = serde_json::from_str::<SavedDevice<S>>(text);
    let message = decoded.err().expect("an error").to_string();
    message.split(" at line").next().expect("a part").to_owned()
}

#[test]
fn state_of_another_version_or_type_is_refused_by_what_was_found_and_expected() {
    let net = saved(SavedNet {
        mac: [2, 0, 0, 0, 0, 1],
        filter: Filter::new(true),
        pairs: 2,
        guest_offloads: 0x83,
        must_announce: true,
        is_link_up: true,
    });
    let text = serde_json::to_string(&net).unwrap();
    assert_eq!(
        serde_json::from_str::<SavedDevice<SavedNet>>(&text).unwrap(),
        net
    );
    let other = "type of device: found 1, expected ";
    assert_eq!(refusal::<SavedBlk>(&text), format!("{other}2"));
    assert_eq!(refusal::<SavedBalloon>(&text), format!("{other}5"));
    for (key, found, message) in [
        (
            "version",
            3,
            "version of saved devices: found 3, expected 4",
        ),
        (
            "version",
            5,
            "version of saved devices: found 5, expected 4",
        ),
        ("device_type", 2, "type of device: found 2, expected 1"),
        (
            "class_version",
            1,
            "version of saved devices of type 1: found 1, expected 2",
        ),
    ] {
        // In the text, whose order is that of the fields: a value of JSON would sort them.
        let current = serde_json::from_str::<Value>(&text).unwrap()[key].clone();
        let changed = text.replace(
            &format!("\"{key}\":{current},"),
            &format!("\"{key}\":{found},"),
        );
        assert_eq!(refusal::<SavedNet>(&changed), message);
    }
}

#[test]
fn the_version_is_checked_before_what_another_version_lacks() {
    // As version 3 wrote a block device.
    let old = "{\"version\":3,\"device_type\":2,\"features\":4294967296,\"needs_reset\":false,\
               \"queues\":[],\"held_frame\":[],\"balloon_actual\":0}";
    assert_eq!(
        refusal::<SavedBlk>(old),
        "version of saved devices: found 3, expected 4"
    );
    let bare = json!({ "version": 4, "device_type": 2 }).to_string();
    // Sorted by key, so the type comes first and is right.
    assert_eq!(refusal::<SavedBlk>(&bare), "missing field `class_version`");
}
