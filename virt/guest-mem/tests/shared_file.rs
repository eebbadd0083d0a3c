//! A piece of a memory file shared word by word.

#![cfg(not(miri))] // no memory files there

mod support;

use guest_mem::{FileError, SharedFile};
use support::{get, memfd, put};

const PAGE: u64 = 4096;

#[test]
fn words_are_little_endian_and_in_the_file() {
    let ours = SharedFile::create(64).unwrap();
    ours.store_u8(0, 1);
    ours.store_u16(2, 0x0302);
    ours.store_u32(4, 0x0706_0504);
    ours.store_u64(8, 0x0f0e_0d0c_0b0a_0908);
    let file = ours.file().try_clone_to_owned().unwrap();
    assert_eq!(
        get(&file, 0, 16),
        [1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    );
    let theirs = SharedFile::open(file, 0, 64).unwrap();
    assert_eq!(theirs.load_u64(8), 0x0f0e_0d0c_0b0a_0908);
    assert_eq!(theirs.load_u32(4), 0x0706_0504);
    theirs.store_u64(56, 5);
    assert_eq!(
        (ours.load_u64(56), ours.load_u16(2), ours.load_u8(0)),
        (5, 0x0302, 1)
    );
    assert_eq!((ours.len(), ours.offset(), ours.is_lost()), (64, 0, false));
}

#[test]
fn a_file_of_ours_cannot_be_shrunk() {
    let ours = SharedFile::create(64).unwrap();
    assert!(rustix::fs::ftruncate(ours.file(), 0).is_err());
    assert!(rustix::fs::ftruncate(ours.file(), 2 * PAGE).is_err());
}

#[test]
fn opened_at_an_offset() {
    let file = memfd(3 * PAGE);
    put(&file, 2 * PAGE + 8, &[7]);
    let shared = SharedFile::open(file.try_clone().unwrap(), 2 * PAGE, 100).unwrap();
    assert_eq!(
        (shared.load_u64(8), shared.offset(), shared.len()),
        (7, 2 * PAGE, 100)
    );
    assert_eq!(
        get(
            &shared.file().try_clone_to_owned().unwrap(),
            2 * PAGE + 8,
            1
        ),
        [7]
    );
}

#[test]
fn wrong_pieces_name_the_field() {
    let open = |offset, len| SharedFile::open(memfd(2 * PAGE).try_clone().unwrap(), offset, len);
    assert!(matches!(open(0, 0), Err(FileError::Empty)));
    assert!(matches!(
        open(8, 8),
        Err(FileError::Misaligned { offset: 8 })
    ));
    assert!(matches!(
        open(PAGE, PAGE + 1),
        Err(FileError::PastEnd { size: 8192, .. })
    ));
    assert!(matches!(
        open(PAGE, u64::MAX),
        Err(FileError::PastEnd { .. })
    ));
    assert!(matches!(SharedFile::create(0), Err(FileError::Empty)));
    assert!(matches!(
        SharedFile::create(u64::MAX),
        Err(FileError::PastEnd { .. })
    ));
    assert!(matches!(
        SharedFile::create(1 << 62),
        Err(FileError::Create(_))
    ));
}

#[test]
#[should_panic(expected = "of 64 shared bytes")]
fn word_past_the_piece_panics() {
    // Inside the page that is mapped, outside the piece.
    SharedFile::create(64).unwrap().load_u64(64);
}

#[test]
#[should_panic(expected = "misaligned")]
fn misaligned_word_panics() {
    SharedFile::create(64).unwrap().store_u16(1, 0);
}
