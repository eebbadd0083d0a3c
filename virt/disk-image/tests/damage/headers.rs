//! Headers, their extensions, and marks.

use super::kinds::*;
use super::support;
use super::support::forge::SIZE;

/// Fields of the header, up to its length.
pub fn fields() -> Vec<Damage> {
    vec![
        damage(V3, "an empty file", |f| f.bytes.clear()).refused("not a qcow2 image"),
        damage(V3, "a file cut in its header", |f| f.bytes.truncate(30)).refused("corrupt"),
        damage(V3, "version 4", |f| f.put32(4, 4)).refused("version 4"),
        damage(V3, "clusters of 256 bytes", |f| f.put32(20, 8)).refused("clusters of 2^8"),
        damage(V3, "clusters of 4 MiB", |f| f.put32(20, 22)).refused("clusters of 2^22"),
        damage(V3, "a size of nothing", |f| f.put64(24, 0))
            .refused("0 bytes")
            .unseen("QEMU serves empty disks"),
        damage(V3, "a size that is no sector", |f| f.put64(24, SIZE - 1))
            .refused("multiple of 512")
            .unseen("QEMU rounds it up"),
        damage(V3, "a header shorter than version 3 has", |f| {
            f.put32(100, 96)
        })
        .refused("header of 96"),
        damage(V3, "a header longer than a cluster", |f| f.put32(100, 8192))
            .refused("header of 8192"),
    ]
}

/// Features, their marks, and extensions.
pub fn features() -> Vec<Damage> {
    vec![
        damage(V3, "encryption", |f| f.put32(32, 2)).refused("encryption"),
        damage(V3, "the parameters of an encryption without it", |f| {
            f.extend(0x0537_be77, &[0; 16])
        })
        .refused("encryption"),
        damage(V3, "an extension that does not end", |f| {
            f.put32(104, 0x1234);
            f.put32(108, 5000);
        })
        .refused("extension"),
        damage(V2, "an extension that does not end, version 2", |f| {
            f.put32(72, 0x1234);
            f.put32(76, u32::MAX);
        })
        .refused("extension"),
        damage(V3, "two formats of a backing file", |f| {
            f.bytes[104..136].copy_from_slice(
                &[
                    support::forge::extension(0xe279_2aca, b"raw"),
                    support::forge::extension(0xe279_2aca, b"qcow2"),
                ]
                .concat(),
            );
        })
        .refused("two formats")
        .unseen("QEMU takes the last"),
        damage(V3, "another compression without its feature", |f| {
            f.put32(100, 112);
            f.bytes[104] = 1;
        })
        .refused("compression"),
        damage(V3, "the feature of another compression", |f| {
            f.put64(72, 1 << 3)
        })
        .refused("compression"),
        damage(V3, "the feature of an external data file", |f| {
            f.put64(72, 1 << 2)
        })
        .refused("external data file"),
        damage(V3, "the feature of extended L2 entries", |f| {
            f.put64(72, 1 << 4)
        })
        .refused("extended L2"),
        damage(V3, "an unknown feature", |f| f.put64(72, 1 << 5)).refused("feature 5"),
        damage(V3, "the mark of a corrupt image", |f| f.put64(72, 1 << 1))
            .refused("marked corrupt")
            .unseen("QEMU reads it"),
        damage(V3, "the mark of a dirty image", |f| f.put64(72, 1))
            .refused_for_writing("marked dirty")
            .unseen("QEMU checks, and finds it good"),
        damage(V3, "names of features that end in the middle", |f| {
            f.extend(0x6803_f857, &[0; 49])
        })
        .refused_for_writing("feature name")
        .unseen("QEMU leaves out what is no whole name"),
        damage(V2, "an extension that nothing knows", |f| {
            f.extend(0x1234_5678, &[7; 20])
        })
        .unseen("it is no damage"),
    ]
}

/// Names of backing files.
pub fn backing_names() -> Vec<Damage> {
    vec![
        damage(V3, "a backing file's name in the header", |f| {
            f.put64(8, 64);
            f.put32(16, 8);
        })
        .refused("name of its backing file")
        .unseen("its check does not look behind the image"),
        damage(V3, "a backing file's name outside the cluster", |f| {
            f.put64(8, 4090);
            f.put32(16, 8);
        })
        .refused("name of its backing file"),
        damage(V3, "a backing file's name too long", |f| {
            f.put64(8, 200);
            f.put32(16, 1024);
        })
        .refused("name of its backing file"),
    ]
}
