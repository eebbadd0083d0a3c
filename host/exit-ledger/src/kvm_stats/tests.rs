use super::*;
use std::io::Write;

/// A file as the kernel lays it out: two counters, `exits` at 8 and `halt_exits` at 0 of the block.
fn sample() -> File {
    let mut bytes = Vec::new();
    let names = ["halt_exits", "exits"];
    let (name_size, descs) = (16_u32, names.len() as u32);
    let data_offset = 24 + descs * (16 + name_size);
    for word in [0, name_size, descs, 0, 24, data_offset] {
        bytes.extend(u32::to_le_bytes(word));
    }
    for (i, name) in names.iter().enumerate() {
        bytes.extend([0; 6]);
        bytes.extend(1_u16.to_le_bytes());
        bytes.extend((8 * i as u32).to_le_bytes());
        bytes.extend([0; 4]);
        let mut padded = name.as_bytes().to_vec();
        padded.resize(name_size as usize, 0);
        bytes.extend(padded);
    }
    bytes.extend(7_u64.to_le_bytes());
    bytes.extend(42_u64.to_le_bytes());
    let path = std::env::temp_dir().join(format!("exitless-stats-{}", std::process::id()));
    let mut file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    file.write_all(&bytes).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

#[test]
fn finds_counters_by_name_and_sums_them() {
    let stats = VcpuStats::new(sample(), &["exits", "no_such_counter", "halt_exits"]).unwrap();
    let mut sums = [1, 1, 1];
    stats.add_to(&mut sums).unwrap();
    assert_eq!(sums, [43, 1, 8]);
}
