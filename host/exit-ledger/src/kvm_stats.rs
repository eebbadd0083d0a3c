//! KVM's binary statistics of one vCPU (`KVM_GET_STATS_FD`, Linux 5.14; the kernel's
//! `virt/kvm/api.rst` §4.133).
//!
//! The descriptor is a file: a header, descriptors that name each counter, and a block of `u64`s.
//! The names are read once; a snapshot is one `pread` of the block.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of the header, and of a descriptor without its name.
const HEADER_SIZE: usize = 24;
const DESC_SIZE: usize = 16;
/// Bounds on what the kernel may claim, so that a wrong descriptor cannot make us allocate: names
/// are 48 bytes and counters about 60 in Linux 6.1.
const MAX_NAME: usize = 256;
const MAX_DESCS: usize = 1024;

/// One vCPU's counters.
#[derive(Debug)]
pub struct VcpuStats {
    file: File,
    data_offset: u64,
    wanted: Vec<Option<usize>>,
    len: usize,
}

impl VcpuStats {
    /// Looks `names` up; a name this kernel lacks reads as zero ever after.
    ///
    /// # Errors
    /// The file cannot be read, or is not the format above.
    pub fn new(file: File, names: &[&str]) -> io::Result<Self> {
        let mut header = [0_u8; HEADER_SIZE];
        file.read_exact_at(&mut header, 0)?;
        let field = |i: usize| {
            u32::from_le_bytes(header[4 * i..4 * i + 4].try_into().expect("four bytes")) as usize
        };
        let (name_size, num_desc, desc_offset, data_offset) =
            (field(1), field(2), field(4), field(5));
        if name_size > MAX_NAME || num_desc > MAX_DESCS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "KVM statistics header",
            ));
        }
        let mut descs = vec![0_u8; num_desc * (DESC_SIZE + name_size)];
        file.read_exact_at(&mut descs, desc_offset as u64)?;
        let mut wanted = vec![None; names.len()];
        let mut len = 0;
        for desc in descs.chunks_exact(DESC_SIZE + name_size) {
            let offset = u32::from_le_bytes(desc[8..12].try_into().expect("four bytes")) as usize;
            let name = desc[DESC_SIZE..]
                .split(|b| *b == 0)
                .next()
                .unwrap_or_default();
            if let Some(i) = names.iter().position(|n| n.as_bytes() == name) {
                wanted[i] = Some(offset);
                len = len.max(offset + 8);
            }
        }
        Ok(Self {
            file,
            data_offset: data_offset as u64,
            wanted,
            len,
        })
    }

    /// Adds the present values, in the order of the names, to `sums`.
    pub fn add_to(&self, sums: &mut [u64]) -> io::Result<()> {
        let mut data = vec![0_u8; self.len];
        self.file.read_exact_at(&mut data, self.data_offset)?;
        for (sum, offset) in sums.iter_mut().zip(&self.wanted) {
            if let Some(bytes) = offset.and_then(|at| data.get(at..at + 8)) {
                *sum += u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
