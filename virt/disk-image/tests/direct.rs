//! Raw disks past the page cache, on devices in blocks of 4096 bytes.

mod support;

use support::Loop;
use vio::blk::{Blk, BlkConfig, RawDisk, RawDiskOptions};

#[test]
fn a_disk_in_smaller_blocks_than_its_device_is_refused_past_the_page_cache_only() {
    let Some(device) = Loop::attach(4096) else {
        return;
    };
    let make = |o_direct, logical_block| {
        let options = RawDiskOptions {
            o_direct,
            ..Default::default()
        };
        let file = RawDisk::open(&device.nodes[0], options).expect("it opens");
        let config = BlkConfig {
            logical_block,
            ..Default::default()
        };
        Blk::new(config, Box::new(file)).map(drop)
    };
    let Err(error) = make(true, 512) else {
        panic!("every request of 512 bytes would fail");
    };
    assert!(error.to_string().contains("block=4096"), "{error}");
    assert_eq!(make(true, 4096), Ok(()));
    assert_eq!(make(false, 512), Ok(()));
    let Some(device) = Loop::attach(512) else {
        return;
    };
    let options = RawDiskOptions {
        o_direct: true,
        ..Default::default()
    };
    let file = RawDisk::open(&device.nodes[0], options).expect("it opens");
    assert!(Blk::new(BlkConfig::default(), Box::new(file)).is_ok());
}
