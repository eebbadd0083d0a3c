//! Single frames with their headers, for tests of the device behind the client.

use crate::client::Client;
use crate::frame::HEADER_LEN;
use crate::ring::RingError;

/// A virtio-net header and a frame.
pub type Packet = ([u8; HEADER_LEN as usize], Vec<u8>);

impl Client {
    /// Sends a frame of at most [`max_frame`](crate::Options::max_frame) bytes by a queue pair.
    /// Returns false if its ring is full.
    ///
    /// # Errors
    /// The device has broken the ring's protocol.
    pub fn send_frame(&mut self, pair: usize, (header, frame): &Packet) -> Result<bool, RingError> {
        let transmit = &mut self.pairs[pair].transmit;
        transmit.reclaim(&self.memory, usize::MAX)?;
        Ok(transmit.send_one(&self.memory, &self.layout, header, frame))
    }

    /// Returns frames that a queue pair has received, at most a burst.
    ///
    /// # Errors
    /// The device has broken the ring's protocol.
    ///
    /// # Panics
    /// If a received frame is malformed.
    pub fn take_frames(&mut self, pair: usize) -> Result<Vec<Packet>, RingError> {
        let mut packets = Vec::new();
        let receive = &mut self.pairs[pair].receive;
        let most = usize::MAX;
        receive.receive(&self.memory, &self.layout, most, |arrived, pieces| {
            if let Err(fault) = arrived {
                panic!("no frame: {fault:?}");
            }
            let mut frame = Vec::new();
            pieces.copy(&mut frame);
            packets.push((pieces.header(), frame));
        })?;
        Ok(packets)
    }
}
