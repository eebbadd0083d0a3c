//! Compressed data, which the storage unpacks ([`Shared::unpack`](crate::storage::Shared::unpack))
//! in the place of the library.

use std::io;

use imago::{FormatAccess, ShallowMapping};

use super::{pieces, some};
use crate::chain::Files;
use crate::storage::ImageFile;

/// Returns the depth in the chain of the image whose compressed data a range begins with, and their
/// position on its disk, or nothing if they are not compressed; and the length for which that
/// holds.
fn packed_at(
    access: &FormatAccess<ImageFile>,
    offset: u64,
    len: u64,
) -> io::Result<(Option<(usize, u64)>, u64)> {
    let (mut layer, mut at, mut rest) = (access, offset, len);
    for depth in 0.. {
        let (mapping, run) = layer.get_shallow_mapping(at, rest)?;
        match mapping {
            // Bound: the chain's length.
            ShallowMapping::Indirect {
                layer: next,
                offset,
                ..
            } => {
                (layer, at, rest) = (next, offset, some(run)?);
            }
            ShallowMapping::Special { offset, .. } => {
                return Ok((Some((depth, offset)), some(run)?));
            }
            // Behind the end of a shorter file there are zeroes.
            ShallowMapping::Eof { .. } if depth != 0 => return Ok((None, rest)),
            _ => return Ok((None, some(run)?)),
        }
    }
    Err(io::Error::other("a chain of images without end"))
}

/// Reads a range that may have compressed data: those by our own way.
pub(super) fn read_packed(
    files: &Files,
    access: &FormatAccess<ImageFile>,
    mut offset: u64,
    mut data: &mut [u8],
) -> io::Result<()> {
    while !data.is_empty() {
        let (packed, run) = packed_at(access, offset, data.len() as u64)?;
        let (part, rest) = std::mem::take(&mut data).split_at_mut(run as usize);
        match packed {
            None => access.read(&mut *part, offset)?,
            Some((depth, at)) => unpack(files, depth, at, part)?,
        }
        data = rest;
        offset += run;
    }
    Ok(())
}

/// Reads compressed data of the image at `depth`, from `at` of its disk on.
fn unpack(files: &Files, depth: usize, at: u64, part: &mut [u8]) -> io::Result<()> {
    let file = files.at(depth);
    let file = file.ok_or_else(|| io::Error::other("compressed data in no image"))?;
    let cluster = file.cluster_bytes();
    let mut rest = part;
    for (at, len) in pieces(at, rest.len() as u64, cluster) {
        let (piece, more) = rest.split_at_mut(len as usize);
        file.unpack(at, piece)?;
        rest = more;
    }
    Ok(())
}

/// Checks that the parts of the first and the last cluster that a write of this range leaves can be
/// read: the library copies them, and takes compressed data by its own way.
pub(super) fn check_copied(
    files: &Files,
    access: &FormatAccess<ImageFile>,
    cluster: u64,
    offset: u64,
    len: u64,
) -> io::Result<()> {
    if cluster == 1 || !(files.has_backing() || files.has_packed()) {
        return Ok(());
    }
    let end = offset + len;
    let (first, last) = (offset / cluster * cluster, (end - 1) / cluster * cluster);
    let mut scratch = Vec::new();
    for start in [first, last] {
        let stop = (start + cluster).min(access.size());
        if (offset <= start && stop <= end)
            || (start == last && start == first && !scratch.is_empty())
        {
            continue;
        }
        let (mut at, mut packed) = (start, false);
        while at < stop && !packed {
            let (found, run) = packed_at(access, at, stop - at)?;
            packed = found.is_some();
            at += run;
        }
        if packed {
            scratch.resize((stop - start) as usize, 0);
            read_packed(files, access, start, &mut scratch)?;
        }
    }
    Ok(())
}
