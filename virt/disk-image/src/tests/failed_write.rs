//! Storage that fails for a while: whatever write of the file it is that fails, what was reported
//! done is there afterwards.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::FallocateFlags;
use seeded::Random;

use super::failed_sync::create;
use crate::chain;
use crate::file_io::FileIo;
use crate::image::Image;
use crate::options::{ImageFormat, ImageOptions};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const OPERATIONS: usize = 60;

/// Writes of the file, counted; those from `first` to before `end` fail.
#[derive(Default)]
struct Writes {
    count: AtomicU64,
    first: u64,
    end: u64,
}

impl Writes {
    fn next(&self) -> io::Result<()> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        if (self.first..self.end).contains(&number) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(())
    }
}

struct Failing {
    file: File,
    writes: Arc<Writes>,
}

impl FileIo for Failing {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileIo::read_at(&self.file, buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.writes.next()?;
        FileIo::write_all_at(&self.file, bytes, offset)
    }

    fn grow(&self, len: u64) -> io::Result<()> {
        self.writes.next()?;
        self.file.grow(len)
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        self.writes.next()?;
        self.file.fallocate(mode, offset, len)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Content of a block according to the outcomes reported: one byte throughout, or unknown (`None`).
type ExpectedByte = Option<u8>;

fn operate(image: &Image, random: &mut Random, known: &mut [ExpectedByte]) -> io::Result<()> {
    let block = random.below(BLOCKS);
    let offset = block * BLOCK;
    let (slot, value) = (&mut known[block as usize], random.bits() as u8);
    let before = slot.take();
    match random.below(8) {
        0 => {
            image.discard(offset, BLOCK)?;
        }
        1 => {
            image.write_zeroes(offset, BLOCK, random.chance(0.5))?;
            *slot = Some(0);
        }
        2 => {
            *slot = before;
            image.flush()?;
        }
        _ => {
            let data = [value; BLOCK as usize];
            if !image.overwrite(offset, &data)? {
                let mut group = image.group().expect("the image");
                group.write(offset, &data)?;
                group.flush()?;
            }
            *slot = Some(value);
        }
    }
    Ok(())
}

fn check(image: &Image, known: &[ExpectedByte], when: &str) {
    for (block, value) in (0..).zip(known) {
        let mut data = [0; BLOCK as usize];
        image.read(block * BLOCK, &mut data).expect("a read");
        let Some(value) = value else { continue };
        let is_there = data.iter().all(|byte| byte == value);
        assert!(
            is_there,
            "{when}: block {block} is {}, not {value}",
            data[0]
        );
    }
}

#[test]
fn completed_operations_survive_a_failed_write_of_the_file() {
    let mut failed = 0;
    for first in 0..120 {
        for (length, cluster) in [(1, 512), (1, 4096), (3, 65536)] {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("disk");
            create(&path, BLOCKS * BLOCK, cluster);
            let options = ImageOptions {
                format: ImageFormat::Qcow2,
                ..ImageOptions::default()
            };
            let writes = Arc::new(Writes {
                first,
                end: first + length,
                ..Writes::default()
            });
            let opened = chain::open_through(&path, &options, &|file| {
                let writes = Arc::clone(&writes);
                Box::new(Failing { file, writes })
            });
            // Opening may write, too.
            let Ok(opened) = opened else { continue };
            let image = Image::new(opened);
            let mut random = Random::new(first + 1);
            let mut known = vec![Some(0); BLOCKS as usize];
            for _ in 0..OPERATIONS {
                failed += usize::from(operate(&image, &mut random, &mut known).is_err());
            }
            image
                .flush()
                .expect("a flush when the storage is well again");
            let when = format!("write {first} of clusters of {cluster}");
            check(&image, &known, &when);
            drop(image);
            let again = chain::open(&path, &options).expect("it opens again");
            check(&Image::new(again), &known, &format!("{when}, opened again"));
        }
    }
    println!("{failed} operations failed");
    assert!(failed > 300, "{failed}");
}
