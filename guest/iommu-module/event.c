// SPDX-License-Identifier: GPL-2.0
/*
 * Event queue: fault reports (VIRTIO 1.3, 5.13.6.9), counted and logged at a limited rate.
 *
 * The interrupt only queues work, and one run of the work handles a bounded number of reports, so
 * a device that reports without end costs a share of one CPU, not all of it.
 */
#include <linux/slab.h>

#include "exitless-iommu.h"

#define EXI_EVENTS_PER_RUN 64

static int event_add(struct exi_iommu *iommu, struct virtio_iommu_fault *fault, gfp_t gfp)
{
	struct scatterlist sg;

	sg_init_one(&sg, fault, sizeof(*fault));
	return virtqueue_add_inbuf(iommu->vqs[1], &sg, 1, fault, gfp);
}

int exi_events_fill(struct exi_iommu *iommu)
{
	unsigned int i, n = min_t(u32, virtqueue_get_vring_size(iommu->vqs[1]), EXI_EVENTS);
	int ret;

	iommu->events = kcalloc(n, sizeof(*iommu->events), GFP_KERNEL);
	if (!iommu->events)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		ret = event_add(iommu, &iommu->events[i], GFP_KERNEL);
		if (ret)
			return ret;
	}
	return 0;	/* the caller notifies, once the device may be notified */
}

static void event_report(struct exi_iommu *iommu, const struct virtio_iommu_fault *fault)
{
	static const char * const reasons[] = { "unknown", "no domain", "no mapping" };
	u32 flags = le32_to_cpu(fault->flags);
	u8 reason = fault->reason;
	char address[24] = "";

	/* The device MAY leave the address out, and undefined reasons count as unknown. */
	if (flags & VIRTIO_IOMMU_FAULT_F_ADDRESS)
		snprintf(address, sizeof(address), " %#llx", le64_to_cpu(fault->address));
	dev_err_ratelimited(&iommu->vdev->dev,
			    "fault: endpoint %u, %s, address%s, flags %#x%s%s\n",
			    le32_to_cpu(fault->endpoint),
			    reasons[reason < ARRAY_SIZE(reasons) ? reason : 0],
			    *address ? address : " not given", flags,
			    flags & VIRTIO_IOMMU_FAULT_F_READ ? " read" : "",
			    flags & VIRTIO_IOMMU_FAULT_F_WRITE ? " write" : "");
}

void exi_event_fn(struct work_struct *work)
{
	struct exi_iommu *iommu = container_of(work, struct exi_iommu, event_work);
	struct virtqueue *vq = iommu->vqs[1];
	struct virtio_iommu_fault *fault;
	unsigned int len, n, faults = 0;

	for (n = 0; n < EXI_EVENTS_PER_RUN; n++) {
		fault = virtqueue_get_buf(vq, &len);
		if (!fault) {
			if (virtqueue_enable_cb(vq))
				break;
			continue;	/* one arrived meanwhile */
		}
		/* 5.13.6.9: a report whose reserved field is not zero MUST be ignored. */
		if (len >= sizeof(*fault) &&
		    !memchr_inv(fault->reserved, 0, sizeof(fault->reserved))) {
			faults++;
			event_report(iommu, fault);
		}
		event_add(iommu, fault, GFP_KERNEL);
	}
	virtqueue_kick(vq);
	spin_lock_irq(&iommu->vq_lock);
	iommu->st.faults += faults;
	spin_unlock_irq(&iommu->vq_lock);
	if (n == EXI_EVENTS_PER_RUN && !READ_ONCE(iommu->closing))
		queue_work(iommu->wq, &iommu->event_work);
}

void exi_event_interrupt(struct virtqueue *vq)
{
	struct exi_iommu *iommu = vq->vdev->priv;

	virtqueue_disable_cb(vq);
	if (!READ_ONCE(iommu->closing))
		queue_work(iommu->wq, &iommu->event_work);
}
