//! Headers, their extensions, and marks.

use super::kinds::*;
use super::support;
use super::support::forge::SIZE;

pub fn headers() -> Vec<Damage> {
    use Image::{V2, V3};
    vec![
        both(
            "an empty file",
            V3,
            |f| f.bytes.clear(),
            "not a qcow2 image",
            Something,
        ),
        both(
            "a file cut in its header",
            V3,
            |f| f.bytes.truncate(30),
            "corrupt",
            Something,
        ),
        both("version 4", V3, |f| f.put32(4, 4), "version 4", Something),
        both(
            "clusters of 256 bytes",
            V3,
            |f| f.put32(20, 8),
            "clusters of 2^8",
            Something,
        ),
        both(
            "clusters of 4 MiB",
            V3,
            |f| f.put32(20, 22),
            "clusters of 2^22",
            Something,
        ),
        both(
            "a size of nothing",
            V3,
            |f| f.put64(24, 0),
            "0 bytes",
            Nothing("QEMU serves empty disks"),
        ),
        both(
            "a size that is no sector",
            V3,
            |f| f.put64(24, SIZE - 1),
            "multiple of 512",
            Nothing("QEMU rounds it up"),
        ),
        both(
            "a header shorter than version 3 has",
            V3,
            |f| f.put32(100, 96),
            "header of 96",
            Something,
        ),
        both(
            "a header longer than a cluster",
            V3,
            |f| f.put32(100, 8192),
            "header of 8192",
            Something,
        ),
        both(
            "encryption",
            V3,
            |f| f.put32(32, 2),
            "encryption",
            Something,
        ),
        both(
            "the parameters of an encryption without it",
            V3,
            |f| f.extend(0x0537_be77, &[0; 16]),
            "encryption",
            Something,
        ),
        both(
            "an extension that does not end",
            V3,
            |f| {
                f.put32(104, 0x1234);
                f.put32(108, 5000);
            },
            "extension",
            Something,
        ),
        both(
            "an extension that does not end, version 2",
            V2,
            |f| {
                f.put32(72, 0x1234);
                f.put32(76, u32::MAX);
            },
            "extension",
            Something,
        ),
        both(
            "two formats of a backing file",
            V3,
            |f| {
                f.bytes[104..136].copy_from_slice(
                    &[
                        support::forge::extension(0xe279_2aca, b"raw"),
                        support::forge::extension(0xe279_2aca, b"qcow2"),
                    ]
                    .concat(),
                );
            },
            "two formats",
            Nothing("QEMU takes the last"),
        ),
        both(
            "another compression without its feature",
            V3,
            |f| {
                f.put32(100, 112);
                f.bytes[104] = 1;
            },
            "compression",
            Something,
        ),
        both(
            "the feature of another compression",
            V3,
            |f| f.put64(72, 1 << 3),
            "compression",
            Something,
        ),
        both(
            "the feature of an external data file",
            V3,
            |f| f.put64(72, 1 << 2),
            "external data file",
            Something,
        ),
        both(
            "the feature of extended L2 entries",
            V3,
            |f| f.put64(72, 1 << 4),
            "extended L2",
            Something,
        ),
        both(
            "an unknown feature",
            V3,
            |f| f.put64(72, 1 << 5),
            "feature 5",
            Something,
        ),
        both(
            "the mark of a corrupt image",
            V3,
            |f| f.put64(72, 1 << 1),
            "marked corrupt",
            Nothing("QEMU reads it"),
        ),
        writing(
            "the mark of a dirty image",
            V3,
            |f| f.put64(72, 1),
            "marked dirty",
            Nothing("QEMU checks, and finds it good"),
        ),
        both(
            "a backing file's name in the header",
            V3,
            |f| {
                f.put64(8, 64);
                f.put32(16, 8);
            },
            "name of its backing file",
            Nothing("its check does not look behind the image"),
        ),
        both(
            "a backing file's name outside the cluster",
            V3,
            |f| {
                f.put64(8, 4090);
                f.put32(16, 8);
            },
            "name of its backing file",
            Something,
        ),
        both(
            "a backing file's name too long",
            V3,
            |f| {
                f.put64(8, 200);
                f.put32(16, 1024);
            },
            "name of its backing file",
            Something,
        ),
        writing(
            "names of features that end in the middle",
            V3,
            |f| f.extend(0x6803_f857, &[0; 49]),
            "feature name",
            Nothing("QEMU leaves out what is no whole name"),
        ),
        Damage {
            what: "an extension that nothing knows",
            image: V2,
            make: |f| f.extend(0x1234_5678, &[7; 20]),
            reading: Fine,
            writing: Fine,
            qemu: Nothing("it is no damage"),
        },
    ]
}
