//! Every system call with a pointer, and every access to memory that a device shares.
//!
//! Two kinds of mappings are made here and never moved: [`Pages`] of this process, which a device
//! may read and write at any moment, and therefore are accessed only as atomics; and [`Registers`]
//! of a device, reached by volatile accesses of the requested width. Both end with their value.
//!
//! UNSAFETY: system calls, and pointers to memory that changes by itself.
#![expect(unsafe_code, reason = "system calls, and memory that a device changes")]

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

use crate::error::Errno;
use crate::uapi::{
    Call, Descriptor, Descriptors, DmaMap, IOMMU_MAP_DMA, InfoBuffer, Name, Nothing, Sized32, Value,
};

fn answer(returned: libc::c_int) -> Result<i32, Errno> {
    match returned {
        0.. => Ok(returned),
        _ => Err(Errno::last()),
    }
}

/// A call whose argument is a structure, which the kernel may fill in.
pub fn with_struct<T: Sized32>(
    file: &File,
    call: &Call<T>,
    argument: &mut T,
) -> Result<i32, Errno> {
    // Whatever it said before.
    argument.as_mut_bytes()[..4].copy_from_slice(&T::zeroed().as_bytes()[..4]);
    // SAFETY: `call` pairs the number with the structure that the header names for it (`uapi`), the
    // kernel reads and writes as many bytes of it as its first word says, which is its length, and
    // any bytes are a value of it. None of these calls concerns memory elsewhere: the one that does
    // has another type.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, std::ptr::from_mut(argument)) })
}

/// A call whose argument is a number.
pub fn with_value(file: &File, call: &Call<Value>, value: u32) -> Result<i32, Errno> {
    // SAFETY: these calls take the argument as a number, or not at all.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, libc::c_ulong::from(value)) })
}

/// A call without an argument.
pub fn without_argument(file: &File, call: &Call<Nothing>) -> Result<i32, Errno> {
    // SAFETY: the kernel reads no argument of these calls.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, 0) })
}

/// A call that is given `struct vfio_irq_set` with descriptors behind it, all of `argument`.
/// Answers with a number above 0 where fewer vectors could be had than asked for, and none is set
/// then.
pub fn with_descriptors(
    file: &File,
    call: &Call<Descriptors>,
    argument: &mut [u8],
) -> Result<i32, Errno> {
    state_len(argument)?;
    // SAFETY: the kernel reads at most as many bytes as the first word says, which is all of the
    // argument, and writes none. A descriptor in it that is no eventfd is an error of the call.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, argument.as_ptr()) })
}

/// Writes the length of `argument` into its first word, as the kernel wants it.
fn state_len(argument: &mut [u8]) -> Result<(), Errno> {
    let len = u32::try_from(argument.len()).map_err(|_| Errno(libc::EINVAL))?;
    let word = argument.get_mut(..4).ok_or(Errno(libc::EINVAL))?;
    word.copy_from_slice(&len.to_ne_bytes());
    Ok(())
}

/// A call that is given a descriptor.
pub fn with_descriptor(
    file: &File,
    call: &Call<Descriptor>,
    descriptor: BorrowedFd<'_>,
) -> Result<i32, Errno> {
    let descriptor: libc::c_int = descriptor.as_raw_fd();
    // SAFETY: the kernel reads one `int` there.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            call.number,
            std::ptr::from_ref(&descriptor),
        )
    })
}

/// A call that opens the file with this name.
pub fn open_by_name(file: &File, call: &Call<Name>, name: &CStr) -> Result<File, Errno> {
    // SAFETY: the kernel reads a string there, up to its zero byte.
    let opened = answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, name.as_ptr()) })?;
    // SAFETY: the call answers with a new descriptor, which has no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(opened) }))
}

/// A call that fills a buffer and reports in its first word the length that it would need.
pub fn with_buffer(file: &File, call: &Call<InfoBuffer>, buffer: &mut [u8]) -> Result<(), Errno> {
    state_len(buffer)?;
    // SAFETY: the kernel reads and writes at most as many bytes as the first word says, which is
    // all of the buffer.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, buffer.as_mut_ptr()) }).map(|_| ())
}

/// `VFIO_IOMMU_MAP_DMA`.
///
/// # Safety
/// Until a call that unmaps the IOVAs has succeeded, the memory that is named stays mapped in this
/// process, and is accessed in no way that a change by a device would break.
pub unsafe fn map_dma(container: &File, argument: &DmaMap) -> Result<(), Errno> {
    let argument = DmaMap {
        argsz: DmaMap::zeroed().argsz,
        ..*argument
    };
    // SAFETY: the kernel reads the structure; what it names is the caller's promise.
    answer(unsafe {
        libc::ioctl(
            container.as_raw_fd(),
            IOMMU_MAP_DMA.number,
            std::ptr::from_ref(&argument),
        )
    })
    .map(|_| ())
}

/// A mapping, unmapped in the end.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is the process's, and no thread's.
unsafe impl Send for Mapping {}
// SAFETY: it is reached through atomics and volatile accesses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` bytes, of a file from `offset` on if there is one.
    fn new(len: usize, of: Option<(&File, u64)>) -> Result<Self, Errno> {
        let offset = of.map_or(Ok(0), |(_, offset)| offset.try_into());
        let offset: libc::off_t = offset.map_err(|_| Errno(libc::EOVERFLOW))?;
        let (flags, descriptor) = match of {
            Some((file, _)) => (libc::MAP_SHARED, file.as_raw_fd()),
            // Shared, so that a child process gets no copy of a page in whose place the device
            // would write to the other one.
            None => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1),
        };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, descriptor, offset) };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { start, len }),
            _ => Err(Errno::last()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value is the mapping's owner, and what borrows from it has ended.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, 0, "its own start and length");
    }
}

/// Pages of this process, zeroed, that others may change at any moment.
#[derive(Debug)]
pub struct Pages(Mapping);

impl Pages {
    /// `len` bytes, a multiple of the page size.
    pub fn new(len: usize) -> Result<Self, Errno> {
        Mapping::new(len, None).map(Self)
    }

    /// Its address.
    pub fn address(&self) -> u64 {
        self.0.start.addr().get() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// All of it, in words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is readable and writable, begins at a page, is as long as that for as
        // long as `self` is borrowed, any bytes are a word, and atomics may be changed by others.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr().cast(), self.0.len / 8) }
    }

    /// All of it, in bytes.
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: as for words.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr().cast(), self.0.len) }
    }
}

/// Registers of a device.
#[derive(Debug)]
pub struct Registers(Mapping);

macro_rules! access {
    ($read:ident, $write:ident, $type:ty) => {
        /// The register at this byte.
        pub fn $read(&self, offset: usize) -> $type {
            // SAFETY: the place lies in the mapping and is aligned.
            let value = unsafe { self.place::<$type>(offset).read_volatile() };
            // What is read afterwards is not read before.
            fence(Ordering::SeqCst);
            value
        }

        /// Sets it. Whatever was stored before is seen by the device that obeys.
        pub fn $write(&self, offset: usize, value: $type) {
            // On x86 stores to memory and to registers keep their order; the fence keeps the
            // compiler's.
            fence(Ordering::SeqCst);
            // SAFETY: the place lies in the mapping and is aligned.
            unsafe { self.place::<$type>(offset).write_volatile(value) };
        }
    };
}

impl Registers {
    /// `len` bytes of a device's file from `offset` on.
    pub fn new(device: &File, offset: u64, len: usize) -> Result<Self, Errno> {
        Mapping::new(len, Some((device, offset))).map(Self)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    access!(read32, write32, u32);
    access!(read64, write64, u64);

    /// Returns the address of a register.
    fn place<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(
            offset.is_multiple_of(size) && self.0.len.checked_sub(size) >= Some(offset),
            "a register of {size} bytes at {offset:#x} of {:#x} bytes",
            self.0.len
        );
        // SAFETY: it was seen to lie in the mapping.
        unsafe { self.0.start.as_ptr().add(offset).cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_outside_or_across_is_refused() {
        let memory = Registers(Mapping::new(4096, None).expect("a page"));
        memory.write32(4092, 7);
        assert_eq!(memory.read32(4092), 7);
        for (offset, wide) in [
            (4096, false),
            (4094, false),
            (4092, true),
            (usize::MAX, false),
        ] {
            let read = std::panic::AssertUnwindSafe(|| match wide {
                true => memory.read64(offset),
                false => u64::from(memory.read32(offset)),
            });
            assert!(std::panic::catch_unwind(read).is_err(), "{offset:#x}");
        }
    }

    #[test]
    fn a_mapping_that_cannot_be_had_is_an_error() {
        assert_eq!(Pages::new(0).map(|_| ()), Err(Errno(libc::EINVAL)));
        assert_eq!(Pages::new(1 << 60).map(|_| ()), Err(Errno(libc::ENOMEM)));
    }
}
