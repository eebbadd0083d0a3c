//! The system calls of vhost: ioctls, and the read and write of IOTLB messages.
//!
//! UNSAFETY: system calls, some of which let the kernel access memory of this process later.
#![expect(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::uapi::{
    Call, IotlbMsg, MemoryTable, Plain, RingAddr, SET_MEM_TABLE, SET_OWNER, SET_VRING_ADDR, UPDATE,
};

fn answer(returned: libc::c_int) -> io::Result<()> {
    match returned {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes an ioctl whose argument the kernel reads and which contains no addresses.
pub fn set<T: Plain>(file: &File, call: &Call<T>, argument: &T) -> io::Result<()> {
    assert!(
        call.number != SET_VRING_ADDR.number,
        "it has a function of its own"
    );
    // SAFETY: `call` pairs the ioctl's number with the structure that the header defines for it
    // (`uapi`). The kernel reads as many bytes as the number encodes. None of these structures
    // contains an address.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), call.number, std::ptr::from_ref(argument)) })
}

/// Makes an ioctl whose argument the kernel fills in.
pub fn get<T: Plain>(file: &File, call: &Call<T>, mut argument: T) -> io::Result<T> {
    // SAFETY: as in `set`. The kernel writes as many bytes as the number encodes, and any bytes are
    // a valid value of a `Plain` type.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            call.number,
            std::ptr::from_mut(&mut argument),
        )
    })?;
    Ok(argument)
}

/// Makes this process the owner of the vhost device.
pub fn set_owner(file: &File) -> io::Result<()> {
    // SAFETY: the call has no argument.
    answer(unsafe { libc::ioctl(file.as_raw_fd(), SET_OWNER, 0) })
}

/// Sets the memory that the kernel may access.
///
/// # Safety
/// All of the table's ranges stay mapped until `file` is closed, and no code has references into
/// them.
pub unsafe fn set_memory(file: &File, table: &MemoryTable) -> io::Result<()> {
    assert!(
        table.regions as usize <= table.region.len(),
        "as many regions as there are"
    );
    // SAFETY: the kernel reads the header and as many regions as that says, all within `table`. The
    // caller vouches for the memory that they describe.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            SET_MEM_TABLE.number,
            std::ptr::from_ref(table),
        )
    })
}

/// Sets the addresses of a ring.
///
/// # Safety
/// As for [`set_memory`], unless the addresses are IOVAs: those are translated by the IOTLB at each
/// use.
pub unsafe fn set_ring_addr(file: &File, addr: &RingAddr) -> io::Result<()> {
    // SAFETY: the kernel reads one structure. The caller vouches for the addresses in it.
    answer(unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            SET_VRING_ADDR.number,
            std::ptr::from_ref(addr),
        )
    })
}

/// Sends a message to the device's IOTLB.
///
/// # Safety
/// As for [`set_memory`], for the memory that an update maps with any access.
pub unsafe fn tell_iotlb(file: &File, message: &IotlbMsg) -> io::Result<()> {
    debug_assert!(message.what >= UPDATE, "what a front end says");
    // SAFETY: as many bytes as the structure has, all of them initialised (`Plain`). The caller
    // vouches for the addresses in them.
    let written = unsafe {
        libc::write(
            file.as_raw_fd(),
            std::ptr::from_ref(message).cast(),
            size_of::<IotlbMsg>(),
        )
    };
    match usize::try_from(written) {
        Ok(len) if len == size_of::<IotlbMsg>() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Returns the next IOTLB message, if there is one. `file` is non-blocking.
pub fn ask_iotlb(file: &File) -> io::Result<Option<IotlbMsg>> {
    let mut message = IotlbMsg::default();
    // SAFETY: the kernel writes at most as many bytes as the structure has, and any bytes are a
    // valid value of it.
    let read = unsafe {
        libc::read(
            file.as_raw_fd(),
            std::ptr::from_mut(&mut message).cast(),
            size_of::<IotlbMsg>(),
        )
    };
    match usize::try_from(read) {
        Ok(len) if len == size_of::<IotlbMsg>() => Ok(Some(message)),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}
