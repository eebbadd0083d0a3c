// SPDX-License-Identifier: GPL-2.0
/*
 * Request queue (VIRTIO 1.3, 5.13.6): preallocated slots, notification, polling for the answer.
 *
 * A slot belongs to the device from the time it is added to the ring until its completion is
 * reaped, however long that takes. Whoever polls reaps for all: each slot names the batch of its
 * waiter, so several CPUs may have requests outstanding and none holds a lock while it polls.
 *
 * The mappings of an UNMAP hang on its slot and are freed, with their addresses, when it
 * completes. So an address range that the device may still translate is never allocated again,
 * whether somebody waits for the UNMAP, gave up on it or never meant to wait.
 */
#include <linux/slab.h>
#include <linux/timekeeping.h>

#include "exitless-iommu.h"

typedef bool exi_done_fn(struct exi_iommu *iommu, struct exi_batch *batch);

int exi_requests_init(struct exi_iommu *iommu)
{
	unsigned int i;

	iommu->nslots = min_t(u32, virtqueue_get_vring_size(iommu->vqs[0]) / 2, EXI_SLOTS_MAX);
	if (iommu->nslots < 4)
		return -EINVAL;
	iommu->slots = kcalloc(iommu->nslots, sizeof(*iommu->slots), GFP_KERNEL);
	if (!iommu->slots)
		return -ENOMEM;
	for (i = 0; i < iommu->nslots; i++) {
		INIT_LIST_HEAD(&iommu->slots[i].maps);
		iommu->free_slots[iommu->nfree++] = i;
	}
	return 0;
}

/* After the device was reset: nothing is mapped any more and no slot is with the device. */
void exi_requests_release(struct exi_iommu *iommu)
{
	struct exi_map *map, *next;
	unsigned int i;
	LIST_HEAD(maps);

	for (i = 0; iommu->slots && i < iommu->nslots; i++) {
		struct exi_slot *slot = &iommu->slots[i];

		if (!slot->busy)
			continue;
		if (slot->map)
			list_add(&slot->map->link, &maps);
		list_splice_init(&slot->maps, &maps);
		kfree(slot->probe);
	}
	list_splice_init(&iommu->deferred, &maps);
	list_splice_init(&iommu->lost, &maps);
	list_for_each_entry_safe(map, next, &maps, link)
		exi_map_free(map);
	kfree(iommu->slots);
	iommu->slots = NULL;
}

void exi_batch_init(struct exi_batch *batch)
{
	batch->pending = 0;
	batch->err = 0;
	INIT_LIST_HEAD(&batch->maps);
}

/*
 * Notifies the device of everything added so far, if it asked to be notified.
 *
 * Interrupts stay off until the notification is out: once this CPU has taken it upon itself, the
 * ring tells every later caller that none is needed. An interrupt handler that unmapped in between
 * would poll for an answer to a notification that waits for the handler's end.
 */
void exi_kick(struct exi_iommu *iommu)
{
	unsigned long flags;
	bool notify;

	spin_lock_irqsave(&iommu->vq_lock, flags);
	notify = virtqueue_kick_prepare(iommu->vqs[0]) && !exi_muted();
	iommu->st.kicks += notify;
	iommu->unkicked = 0;
	spin_unlock(&iommu->vq_lock);
	if (notify)
		virtqueue_notify(iommu->vqs[0]);
	local_irq_restore(flags);
}

/* Reaps until done() or the bound: time and looks both, see EXI_MIN_LOOKS. */
static __always_inline bool exi_poll(struct exi_iommu *iommu, exi_done_fn *done,
				     struct exi_batch *batch)
{
	u64 start = ktime_get_mono_fast_ns(), spent = 0, bound_us;
	unsigned int looks = 0, min_looks;
	unsigned long flags;
	bool ok = true;

	while (!done(iommu, batch)) {
		if (spin_trylock_irqsave(&iommu->vq_lock, flags)) {
			exi_reap(iommu);
			spin_unlock_irqrestore(&iommu->vq_lock, flags);
			looks++;
		}
		if (done(iommu, batch))
			break;
		cpu_relax();
		spent = ktime_get_mono_fast_ns() - start;
		if (READ_ONCE(iommu->suspect)) {
			bound_us = min(READ_ONCE(exi_poll_us), EXI_SUSPECT_US);
			min_looks = EXI_SUSPECT_LOOKS;
		} else {
			bound_us = READ_ONCE(exi_poll_us);
			min_looks = EXI_MIN_LOOKS;
		}
		if (READ_ONCE(iommu->broken) ||
		    (looks >= min_looks && spent > bound_us * NSEC_PER_USEC)) {
			ok = false;
			break;
		}
	}
	spent /= NSEC_PER_USEC;
	if (unlikely(spent > READ_ONCE(iommu->st.spin_max_us))) {
		spin_lock_irqsave(&iommu->vq_lock, flags);
		iommu->st.spin_max_us = max(iommu->st.spin_max_us, spent);
		spin_unlock_irqrestore(&iommu->vq_lock, flags);
	}
	return ok;
}

static bool batch_done(struct exi_iommu *iommu, struct exi_batch *batch)
{
	/* Pairs with the release in completion.c: results are visible once pending is 0. */
	return !smp_load_acquire(&batch->pending);
}

static bool slot_free(struct exi_iommu *iommu, struct exi_batch *batch)
{
	return READ_ONCE(iommu->nfree);
}

static bool async_below_quarter(struct exi_iommu *iommu, struct exi_batch *batch)
{
	return READ_ONCE(iommu->async_out) <= iommu->nslots / 4;
}

/* The waiter gives up: its slots stay with the device and complete without it. */
static void exi_abandon(struct exi_iommu *iommu, struct exi_batch *batch)
{
	struct exi_map *map;
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&iommu->vq_lock, flags);
	exi_reap(iommu);
	for (i = 0; batch->pending && i < iommu->nslots; i++) {
		struct exi_slot *slot = &iommu->slots[i];

		if (!slot->busy || slot->batch != batch)
			continue;
		slot->batch = NULL;
		slot->late = true;
		if (slot->map) {
			list_del_init(&slot->map->link);
			exi_quarantine(iommu, slot->map);
		}
		list_for_each_entry(map, &slot->maps, link)
			exi_quarantine(iommu, map);
		batch->pending--;
		batch->err = -ETIMEDOUT;
	}
	if (batch->err == -ETIMEDOUT) {
		iommu->st.timeouts++;
		exi_set_suspect(iommu);
	}
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
}

/* Notifies the device and waits, bounded, for all requests of a batch. 0 if all succeeded. */
int exi_wait(struct exi_iommu *iommu, struct exi_batch *batch)
{
	if (!batch_done(iommu, batch)) {
		exi_kick(iommu);
		if (!exi_poll(iommu, batch_done, batch))
			exi_abandon(iommu, batch);
	}
	return batch->err;
}

/* Bounds the UNMAPs nobody waits for: at half of the slots, waits until a quarter is left. */
void exi_async_bound(struct exi_iommu *iommu)
{
	unsigned long flags;

	if (READ_ONCE(iommu->async_out) < iommu->nslots / 2)
		return;
	exi_kick(iommu);
	if (READ_ONCE(iommu->suspect) || exi_poll(iommu, async_below_quarter, NULL))
		return;
	spin_lock_irqsave(&iommu->vq_lock, flags);
	if (!async_below_quarter(iommu, NULL)) {
		iommu->st.timeouts++;
		exi_set_suspect(iommu);
	}
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
}

/* Sends async UNMAPs that no later request took along, and reaps those that completed. */
void exi_kick_fn(struct work_struct *work)
{
	struct exi_iommu *iommu = container_of(work, struct exi_iommu, kick_work.work);
	unsigned long flags;

	if (READ_ONCE(iommu->unkicked))
		exi_kick(iommu);
	spin_lock_irqsave(&iommu->vq_lock, flags);
	exi_reap(iommu);
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	if (READ_ONCE(iommu->async_out) && !READ_ONCE(iommu->closing))
		queue_delayed_work(iommu->wq, &iommu->kick_work, 1);
}

/*
 * Returns a free slot with vq_lock held, or NULL with the lock released: the device is suspect or
 * broken, or gave no slot back in time.
 */
static struct exi_slot *slot_get(struct exi_iommu *iommu, unsigned long *flags)
{
	struct exi_slot *slot;
	unsigned int tries;

	/* Another CPU may take the slot that became free; so often is a device in distress. */
	for (tries = 0; tries < 64; tries++) {
		spin_lock_irqsave(&iommu->vq_lock, *flags);
		if (iommu->broken || (iommu->suspect && !exi_reap_suspect(iommu))) {
			iommu->st.suspect_calls++;
			spin_unlock_irqrestore(&iommu->vq_lock, *flags);
			return NULL;
		}
		if (iommu->nfree) {
			slot = &iommu->slots[iommu->free_slots[--iommu->nfree]];
			slot->busy = true;
			return slot;
		}
		spin_unlock_irqrestore(&iommu->vq_lock, *flags);
		exi_kick(iommu);
		if (!exi_poll(iommu, slot_free, NULL)) {
			spin_lock_irqsave(&iommu->vq_lock, *flags);
			/*
			 * Another CPU may have reaped what came last: only a device that
			 * has a request can end its being suspect.
			 */
			exi_reap(iommu);
			if (!iommu->nfree)
				exi_set_suspect(iommu);
			spin_unlock_irqrestore(&iommu->vq_lock, *flags);
			return NULL;
		}
	}
	return NULL;
}

/* Adds a filled slot to the ring. Called with vq_lock held. */
static int slot_add(struct exi_iommu *iommu, struct exi_slot *slot, u8 type, size_t out,
		    struct exi_batch *batch)
{
	struct scatterlist sg_out, sg_in, *sgs[2] = { &sg_out, &sg_in };
	size_t in = sizeof(struct virtio_iommu_req_tail);
	u8 *buf = slot->buf;
	int ret;

	if (type == VIRTIO_IOMMU_T_PROBE) {
		buf = slot->probe;
		in = slot->probe_in;
	}
	slot->type = type;
	slot->out = out;
	slot->batch = batch;
	buf[0] = type;
	memset(buf + out + in - sizeof(struct virtio_iommu_req_tail), 0xff,
	       sizeof(struct virtio_iommu_req_tail));
	sg_init_one(&sg_out, buf, out);
	sg_init_one(&sg_in, buf + out, in);
	ret = virtqueue_add_sgs(iommu->vqs[0], sgs, 1, 1, slot, GFP_ATOMIC);
	if (ret)
		return ret;
	iommu->unkicked++;
	if (batch)
		batch->pending++;
	return 0;
}

/* Queues a MAP request. The mapping joins batch->maps. */
int exi_queue_map(struct exi_map *map, struct exi_batch *batch)
{
	struct exi_iommu *iommu = map->ep->iommu;
	struct virtio_iommu_req_map *req;
	struct exi_slot *slot;
	unsigned long flags;
	int ret;

	slot = slot_get(iommu, &flags);
	if (!slot)
		return -EIO;
	req = (void *)slot->buf;
	memset(req, 0, sizeof(*req));
	req->domain = cpu_to_le32(map->ep->domain);
	req->virt_start = cpu_to_le64((u64)map->iova << PAGE_SHIFT);
	req->virt_end = cpu_to_le64(((u64)(map->iova + map->pages) << PAGE_SHIFT) - 1);
	req->phys_start = cpu_to_le64((u64)map->pfn << PAGE_SHIFT);
	req->flags = cpu_to_le32(map->prot);
	slot->map = map;
	map->state = EXI_MAP_SENT;
	ret = slot_add(iommu, slot, VIRTIO_IOMMU_T_MAP, offsetof(typeof(*req), tail), batch);
	if (ret) {
		exi_slot_put(iommu, slot);
	} else {
		map->ep->st.req_map++;
		list_add_tail(&map->link, &batch->maps);
	}
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	return ret;
}

/*
 * Queues one UNMAP request for a run of mappings whose address ranges follow each other. Takes
 * the mappings over in any case: if the request cannot be sent now they are deferred. Without a
 * batch nobody waits for it.
 */
void exi_queue_unmap(struct exi_ep *ep, struct list_head *run, struct exi_batch *batch)
{
	struct exi_map *first = list_first_entry(run, struct exi_map, link);
	struct exi_map *last = list_last_entry(run, struct exi_map, link);
	struct exi_iommu *iommu = ep->iommu;
	struct virtio_iommu_req_unmap *req;
	struct exi_slot *slot;
	unsigned long flags;

	slot = slot_get(iommu, &flags);
	if (!slot) {
		spin_lock_irqsave(&iommu->vq_lock, flags);
		exi_defer(iommu, run);
		spin_unlock_irqrestore(&iommu->vq_lock, flags);
		return;
	}
	req = (void *)slot->buf;
	memset(req, 0, sizeof(*req));
	req->domain = cpu_to_le32(ep->domain);
	req->virt_start = cpu_to_le64((u64)first->iova << PAGE_SHIFT);
	req->virt_end = cpu_to_le64(((u64)(last->iova + last->pages) << PAGE_SHIFT) - 1);
	list_splice_init(run, &slot->maps);
	if (slot_add(iommu, slot, VIRTIO_IOMMU_T_UNMAP, offsetof(typeof(*req), tail), batch)) {
		exi_defer(iommu, &slot->maps);
		exi_slot_put(iommu, slot);
	} else {
		ep->st.req_unmap++;
		if (!batch) {
			slot->async = true;
			iommu->async_out++;
		}
	}
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
}

/* ATTACH and DETACH: the requests have the same layout up to the flags, which stay 0. */
static int exi_request_binding(struct exi_ep *ep, u8 type)
{
	struct exi_iommu *iommu = ep->iommu;
	struct virtio_iommu_req_attach *req;
	struct exi_batch batch;
	struct exi_slot *slot;
	unsigned long flags;
	int ret;

	exi_batch_init(&batch);
	slot = slot_get(iommu, &flags);
	if (!slot)
		return -EIO;
	req = (void *)slot->buf;
	memset(req, 0, sizeof(*req));
	req->domain = cpu_to_le32(ep->domain);
	req->endpoint = cpu_to_le32(ep->id);
	ret = slot_add(iommu, slot, type, offsetof(typeof(*req), tail), &batch);
	if (ret)
		exi_slot_put(iommu, slot);
	else if (type == VIRTIO_IOMMU_T_ATTACH)
		iommu->st.req_attach++;
	else
		iommu->st.req_detach++;
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	return ret ?: exi_wait(iommu, &batch);
}

int exi_request_attach(struct exi_ep *ep)
{
	return exi_request_binding(ep, VIRTIO_IOMMU_T_ATTACH);
}

int exi_request_detach(struct exi_ep *ep)
{
	return exi_request_binding(ep, VIRTIO_IOMMU_T_DETACH);
}

/* PROBE: on success the caller frees *buf, in which *properties has probe_size bytes. */
int exi_request_probe(struct exi_iommu *iommu, u32 endpoint, u8 **properties, void **buf)
{
	u32 in = iommu->probe_size + sizeof(struct virtio_iommu_req_tail);
	struct virtio_iommu_req_probe *req;
	struct exi_batch batch;
	struct exi_slot *slot;
	unsigned long flags;
	int ret;

	exi_batch_init(&batch);
	req = kzalloc(sizeof(*req) + in, GFP_KERNEL);
	if (!req)
		return -ENOMEM;
	req->endpoint = cpu_to_le32(endpoint);
	slot = slot_get(iommu, &flags);
	if (!slot) {
		kfree(req);
		return -EIO;
	}
	slot->probe = req;
	slot->probe_in = in;
	ret = slot_add(iommu, slot, VIRTIO_IOMMU_T_PROBE, sizeof(*req), &batch);
	if (ret)
		exi_slot_put(iommu, slot);
	else
		iommu->st.req_probe++;
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	ret = ret ?: exi_wait(iommu, &batch);
	if (ret) {
		if (ret != -ETIMEDOUT)	/* else the device still has it: exi_reap() frees it */
			kfree(req);
		return ret;
	}
	*properties = req->properties;
	*buf = req;
	return 0;
}
