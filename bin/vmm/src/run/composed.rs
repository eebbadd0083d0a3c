//! The closed sets of which a machine's owner is composed: its remapping units, defined here, and
//! its functions, defined by each program. To add a unit or a class of function, add a crate, and a
//! variant here.

use assign::calls::CallThread;
use assign::function::Assigned;
use assign::vfio_device::VfioHardware;
use guest_mem::NoIommu;
use machine::{ResolveFunction, units};
use pv_iommu::{IommuFunction, PvIommu, Request as IommuRequest};
use vio::Remote;
use vio::balloon::Balloon;
use vio::caged::Caged;
use vio::net::Net;
use vio::rng::Rng;
use virtio_pci::VirtioFunction;
use vtd_port::VtdPort;

/// Pieces of guest memory in asynchronous use at a time: 1,024 for each of the 31 functions of the
/// bus, which suffices for the largest request (4 MiB in scattered pages), and 32,767 for drivers
/// that need more.
pub const MAX_LEASES: usize = guest_mem::MAX_LEASES;
units! {
    /// The remapping unit of a machine. The paravirtual one receives commands from its function.
    pub enum Units: IommuRequest {
        /// Devices see guest-physical addresses.
        None(NoIommu),
        /// An emulated VT-d unit.
        Vtd(VtdPort),
        /// A paravirtual unit, to which its PCI function sends requests.
        Paravirtual(PvIommu),
    }
}

/// An assigned device, as a function of a machine.
pub type AssignedDevice = Assigned<VfioHardware, CallThread>;

/// Closed set of the functions of a program's machines, made by [`functions!`](crate::functions).
/// The program decides how a disk becomes a function.
pub trait Functions:
    ResolveFunction<IommuRequest>
    + From<VirtioFunction<Net>>
    + From<VirtioFunction<Rng>>
    + From<VirtioFunction<Remote>>
    + From<VirtioFunction<Caged>>
    + From<VirtioFunction<Balloon>>
    + From<IommuFunction>
    + From<AssignedDevice>
    + 'static
{
    /// Returns the balloon, if this is one.
    fn balloon(&mut self) -> Option<&mut Balloon>;

    /// Returns the paravirtual IOMMU's function, if this is it.
    fn iommu(&mut self) -> Option<&mut IommuFunction>;

    /// Returns the assigned device, if this is one.
    fn assigned(&mut self) -> Option<&mut AssignedDevice>;
}

/// Makes the closed set of functions of a program's machines: those that every machine may have,
/// and the program's own.
#[macro_export]
macro_rules! functions {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$variant_meta:meta])* $variant:ident($function:ty)),* $(,)?
    }) => {
        $crate::__private::functions! {
            $(#[$meta])*
            $vis enum $name: $crate::__private::IommuRequest {
                /// A disk.
                Disk($crate::__private::VirtioFunction<$crate::__private::Blk>),
                /// A network card.
                Net($crate::__private::VirtioFunction<$crate::__private::Net>),
                /// An entropy device.
                Rng($crate::__private::VirtioFunction<$crate::__private::Rng>),
                /// A disk that another process serves.
                Remote($crate::__private::VirtioFunction<$crate::__private::Remote>),
                /// A disk whose device model is in another process.
                Caged($crate::__private::VirtioFunction<$crate::__private::Caged>),
                /// A balloon.
                Balloon($crate::__private::VirtioFunction<$crate::__private::Balloon>),
                /// The paravirtual IOMMU.
                Iommu($crate::__private::IommuFunction),
                /// A device of the host's.
                Assigned($crate::run::AssignedDevice),
                $($(#[$variant_meta])* $variant($function)),*
            }
        }

        $crate::functions!(@from $name: Disk(Blk) Net(Net) Rng(Rng) Remote(Remote) Caged(Caged) Balloon(Balloon));

        impl $crate::run::Functions for $name {
            fn balloon(&mut self) -> Option<&mut $crate::__private::Balloon> {
                match self {
                    Self::Balloon(function) => Some(function.device_mut()),
                    _ => None,
                }
            }

            fn iommu(&mut self) -> Option<&mut $crate::__private::IommuFunction> {
                match self {
                    Self::Iommu(function) => Some(function),
                    _ => None,
                }
            }

            fn assigned(&mut self) -> Option<&mut $crate::run::AssignedDevice> {
                match self {
                    Self::Assigned(device) => Some(device),
                    _ => None,
                }
            }
        }

        impl From<$crate::__private::IommuFunction> for $name {
            fn from(function: $crate::__private::IommuFunction) -> Self {
                Self::Iommu(function)
            }
        }

        impl From<$crate::run::AssignedDevice> for $name {
            fn from(device: $crate::run::AssignedDevice) -> Self {
                Self::Assigned(device)
            }
        }
    };
    (@from $name:ident: $($variant:ident($device:ident))*) => {
        $(impl From<$crate::__private::VirtioFunction<$crate::__private::$device>> for $name {
            fn from(function: $crate::__private::VirtioFunction<$crate::__private::$device>) -> Self {
                Self::$variant(function)
            }
        })*
    };
}

/// The owner of a machine's unit and functions, with its guest memory.
pub type Owner<F, M> = machine::Owner<Units, F, M>;

/// Request of another thread to the owner.
pub type Request<F, M> = machine::Request<Owner<F, M>>;
