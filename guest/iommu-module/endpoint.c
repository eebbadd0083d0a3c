// SPDX-License-Identifier: GPL-2.0
/*
 * Endpoints: found when a driver is about to bind, attached to a domain of their own, given DMA
 * operations, and detached at unload.
 *
 * BUS_NOTIFY_BIND_DRIVER comes after the bus configured DMA and before the driver's probe(), so
 * operations installed there serve the driver's first mapping. The notifier cannot veto: an
 * endpoint that cannot be attached gets operations whose every mapping fails, never direct
 * access. Each bound endpoint holds a reference on this module.
 */
#include <linux/module.h>
#include <linux/slab.h>

#include "exitless-iommu.h"

/* x86 interrupt messages: writes there are never translated, whatever the device reports. */
#define EXI_MSI_FIRST 0xfee00000ULL
#define EXI_MSI_LAST  0xfeefffffULL

/* Called with mutex held. */
static struct exi_ep *ep_find(struct exi_iommu *iommu, struct device *dev)
{
	struct exi_ep *ep;

	list_for_each_entry(ep, &iommu->eps, link)
		if (ep->dev == dev && !ep->removed)
			return ep;
	return NULL;
}

static int ep_reserve(struct exi_ep *ep, u64 first, u64 last)
{
	if (first > EXI_IOVA_LAST)
		return 0;
	last = min_t(u64, last, EXI_IOVA_LAST);
	return reserve_iova(&ep->iovad, first >> PAGE_SHIFT, last >> PAGE_SHIFT) ? 0 : -ENOMEM;
}

/* Parses the properties of a PROBE reply (5.13.6.8). All of it is the device's: bounds first. */
static int ep_parse_properties(struct exi_ep *ep, const u8 *properties, u32 size)
{
	const struct virtio_iommu_probe_resv_mem *resv;
	const struct virtio_iommu_probe_property *head;
	u32 at = 0, length;
	u64 first, last;
	u16 type;
	int ret;

	while (size - at >= sizeof(*head)) {
		head = (const void *)(properties + at);
		type = le16_to_cpu(head->type);
		length = le16_to_cpu(head->length);
		if (!type)
			return 0;
		if (length > size - at - sizeof(*head)) {
			dev_err(ep->dev, "PROBE: a property of %u bytes exceeds the reply\n",
				length);
			return -EPROTO;
		}
		/* Bits 12 to 15 are reserved: a property with one set is ignored. */
		if (type == VIRTIO_IOMMU_PROBE_T_RESV_MEM &&
		    length >= sizeof(*resv) - sizeof(*head)) {
			resv = (const void *)head;
			first = le64_to_cpu(resv->start);
			last = le64_to_cpu(resv->end);
			if (first > last) {
				dev_err(ep->dev, "PROBE: reserved region ends before it starts\n");
				return -EPROTO;
			}
			dev_dbg(ep->dev, "reserved %#llx-%#llx, subtype %u\n", first, last,
				resv->subtype);
			ret = ep_reserve(ep, first, last);
			if (ret)
				return ret;
		}
		at += sizeof(*head) + length;
	}
	return 0;
}

static int ep_attach(struct exi_ep *ep)
{
	struct exi_iommu *iommu = ep->iommu;
	u8 *properties;
	void *buf;
	int ret;

	if (iommu->probe_size) {
		ret = exi_request_probe(iommu, ep->id, &properties, &buf);
		if (ret) {
			dev_err(ep->dev, "PROBE of endpoint %u failed: %d\n", ep->id, ret);
			return ret;
		}
		ret = ep_parse_properties(ep, properties, iommu->probe_size);
		kfree(buf);
		if (ret)
			return ret;
	}
	ep->attach_sent = true;
	ret = exi_request_attach(ep);
	if (ret) {
		dev_err(ep->dev, "ATTACH of endpoint %u failed: %d\n", ep->id, ret);
		return ret;
	}
	ep->attached = true;
	dev_info(ep->dev, "exitless-iommu: endpoint %u attached to domain %u\n", ep->id,
		 ep->domain);
	return 0;
}

static void ep_free(struct exi_ep *ep)
{
	put_iova_domain(&ep->iovad);
	put_device(ep->dev);
	kvfree(ep);
}

static struct exi_ep *ep_create(struct exi_iommu *iommu, struct device *dev, u32 id)
{
	struct exi_ep *ep = kvzalloc(sizeof(*ep), GFP_KERNEL);
	int domain, ret = -ENOMEM;

	if (!ep)
		return ERR_PTR(-ENOMEM);
	ep->ops = exi_dma_ops;
	ep->iommu = iommu;
	ep->id = id;
	ep->cycle_start = jiffies;
	spin_lock_init(&ep->lock);
	hash_init(ep->by_key);
	hash_init(ep->by_iova);
	INIT_LIST_HEAD(&ep->stale);
	INIT_LIST_HEAD(&ep->fifo);
	domain = ida_alloc_range(&iommu->domains, iommu->domain_first, iommu->domain_last,
				 GFP_KERNEL);
	if (domain < 0) {
		kvfree(ep);
		return ERR_PTR(domain);
	}
	ep->domain = domain;
	ep->dev = get_device(dev);
	/* Page 0 is never used: address 0 means "none" to the allocator. */
	init_iova_domain(&ep->iovad, PAGE_SIZE, max_t(u64, 1, PFN_UP(iommu->iova_first)));
	ret = iova_domain_init_rcaches(&ep->iovad);
	if (!ret && IS_ENABLED(CONFIG_X86))
		ret = ep_reserve(ep, EXI_MSI_FIRST, EXI_MSI_LAST);
	if (ret) {
		ida_free(&iommu->domains, domain);
		ep_free(ep);
		return ERR_PTR(ret);
	}
	list_add_tail(&ep->link, &iommu->eps);
	return ep;
}

/* A driver is about to bind. */
static void ep_bind(struct exi_iommu *iommu, struct device *dev, u32 id)
{
	unsigned int left;
	struct exi_ep *ep;

	mutex_lock(&iommu->mutex);
	if (iommu->closing)
		goto out;
	ep = ep_find(iommu, dev) ?: ep_create(iommu, dev, id);
	if (IS_ERR(ep)) {
		dev_err(dev, "exitless-iommu: no endpoint state (%ld), its DMA is refused\n",
			PTR_ERR(ep));
		set_dma_ops(dev, &exi_refuse_ops);
		goto out;
	}
	/* Left by a probe that failed: its managed memory was freed after we were notified. */
	left = exi_kill_all(ep);
	if (left)
		dev_warn(dev, "the last driver left %u mappings in use\n", left);
	if (!ep->bound) {
		/* Cannot fail: this notifier runs, so unloading has not passed its removal. */
		__module_get(THIS_MODULE);
		ep->bound = true;
	}
	if (!ep->attached && ep_attach(ep))
		dev_err(dev, "exitless-iommu: not attached, its DMA is refused\n");
	set_dma_ops(dev, &ep->ops);
out:
	mutex_unlock(&iommu->mutex);
}

/* The driver is gone; its mappings are undone except those that it leaked. */
static void ep_unbound(struct exi_iommu *iommu, struct device *dev, bool clean)
{
	unsigned int left;
	struct exi_ep *ep;

	mutex_lock(&iommu->mutex);
	ep = ep_find(iommu, dev);
	if (ep && clean) {
		exi_drop_stale(ep);
		left = exi_kill_all(ep);
		if (left)
			dev_warn(dev, "driver left %u mappings in use\n", left);
	}
	if (ep && ep->bound) {
		ep->bound = false;
		module_put(THIS_MODULE);
	}
	mutex_unlock(&iommu->mutex);
}

/* Called with mutex held. */
static void ep_detach(struct exi_ep *ep)
{
	exi_kill_all(ep);
	if (ep->attach_sent && exi_request_detach(ep)) {
		dev_warn(ep->dev, "DETACH of endpoint %u failed\n", ep->id);
		return;		/* the domain number stays taken */
	}
	ep->attached = ep->attach_sent = false;
	exi_forget_quarantine(ep);
	/* The domain number is free once no request can name it any more: exi_retire_removed. */
}

static void ep_device_removed(struct exi_iommu *iommu, struct device *dev)
{
	struct exi_ep *ep;

	mutex_lock(&iommu->mutex);
	ep = ep_find(iommu, dev);
	if (ep) {
		ep_detach(ep);
		set_dma_ops(dev, NULL);
		if (ep->bound)
			module_put(THIS_MODULE);
		ep->bound = false;
		ep->removed = true;
		exi_retire_removed(iommu);
	}
	mutex_unlock(&iommu->mutex);
}

/* Frees endpoints of removed devices once none of their mappings is left. Mutex held. */
void exi_retire_removed(struct exi_iommu *iommu)
{
	struct exi_ep *ep, *next;

	list_for_each_entry_safe(ep, next, &iommu->eps, link) {
		if (!ep->removed || atomic_read(&ep->nmaps))
			continue;
		list_del(&ep->link);
		if (!ep->attach_sent)
			ida_free(&iommu->domains, ep->domain);
		exi_stats_sum(&iommu->retired, &ep->st);
		ep_free(ep);
	}
}

static int exi_notify(struct notifier_block *nb, unsigned long action, void *data)
{
	struct exi_iommu *iommu = container_of(nb, struct exi_iommu, nb);
	struct device *dev = data;
	u32 id;

	switch (action) {
	case BUS_NOTIFY_BIND_DRIVER:
		if (exi_viot_endpoint(iommu, to_pci_dev(dev), &id))
			ep_bind(iommu, dev, id);
		break;
	case BUS_NOTIFY_UNBOUND_DRIVER:
		ep_unbound(iommu, dev, true);
		break;
	case BUS_NOTIFY_DRIVER_NOT_BOUND:
		/* Memory that a failed probe had managed is freed only after this. */
		ep_unbound(iommu, dev, false);
		break;
	case BUS_NOTIFY_REMOVED_DEVICE:
		ep_device_removed(iommu, dev);
		break;
	}
	return NOTIFY_OK;
}

#if IS_ENABLED(CONFIG_ACPI_VIOT)
/*
 * The kernel's own VIOT code defers every endpoint until an IOMMU with the device's firmware node
 * is registered. This one is, and declines each endpoint, which ends the deferral and leaves
 * dev->dma_ops to us.
 */
static struct iommu_device *stub_probe_device(struct device *dev)
{
	return ERR_PTR(-ENODEV);
}

static const struct iommu_ops stub_ops = {
	.owner = THIS_MODULE,
	.probe_device = stub_probe_device,
};

static int stub_register(struct exi_iommu *iommu)
{
	return iommu_device_register(&iommu->stub, &stub_ops, &iommu->pdev->dev);
}

static void stub_unregister(struct exi_iommu *iommu)
{
	iommu_device_unregister(&iommu->stub);
}
#else
static int stub_register(struct exi_iommu *iommu)
{
	return 0;
}

static void stub_unregister(struct exi_iommu *iommu)
{
}
#endif

/* Returns the device of an endpoint not stopped yet, with a reference, or NULL. */
static struct device *ep_get_next(struct exi_iommu *iommu)
{
	struct device *dev = NULL;
	struct exi_ep *ep;

	mutex_lock(&iommu->mutex);
	list_for_each_entry(ep, &iommu->eps, link) {
		if (ep->removed || ep->stopped)
			continue;
		dev = get_device(ep->dev);
		break;
	}
	mutex_unlock(&iommu->mutex);
	return dev;
}

/*
 * Detaches an endpoint and gives its function direct DMA back. Under the driver core's lock of the
 * device: an unbinding driver's managed memory is freed under it, through these operations.
 * Returns false if a driver is bound.
 */
static bool ep_stop(struct exi_iommu *iommu, struct device *dev)
{
	struct exi_ep *ep;
	bool bound;

	device_lock(dev);
	bound = dev->driver;
	mutex_lock(&iommu->mutex);
	ep = ep_find(iommu, dev);
	if (ep && bound) {
		ep->reattach = true;
	} else if (ep) {
		ep_detach(ep);
		set_dma_ops(dev, NULL);
		ep->stopped = true;
	}
	mutex_unlock(&iommu->mutex);
	device_unlock(dev);
	return !bound;
}

/* Releases the drivers that are still bound and gives all functions direct DMA back. */
static void eps_stop(struct exi_iommu *iommu)
{
	struct pci_dev *pdev = NULL;
	struct device *dev;
	u32 id;

	while ((dev = ep_get_next(iommu))) {
		while (!ep_stop(iommu, dev)) {
			dev_warn(dev, "driver released: its IOMMU is going away\n");
			device_release_driver(dev);
		}
		put_device(dev);
	}
	for_each_pci_dev(pdev)
		if (pdev->dev.dma_ops == &exi_refuse_ops && exi_viot_endpoint(iommu, pdev, &id)) {
			device_release_driver(&pdev->dev);
			device_lock(&pdev->dev);
			set_dma_ops(&pdev->dev, NULL);
			device_unlock(&pdev->dev);
		}
}

/* From here on no endpoint joins and nothing queues work. */
void exi_close(struct exi_iommu *iommu)
{
	mutex_lock(&iommu->mutex);
	WRITE_ONCE(iommu->closing, true);
	mutex_unlock(&iommu->mutex);
}

/* On failure nothing of it is left but the endpoints' memory: exi_endpoints_free(). */
int exi_endpoints_start(struct exi_iommu *iommu)
{
	int ret;

	iommu->nb.notifier_call = exi_notify;
	ret = bus_register_notifier(&pci_bus_type, &iommu->nb);
	if (ret)
		return ret;
	/* Only now: as soon as the deferral ends, drivers bind, and must find the notifier. */
	ret = stub_register(iommu);
	if (ret) {
		exi_close(iommu);
		eps_stop(iommu);
		bus_unregister_notifier(&pci_bus_type, &iommu->nb);
	}
	return ret;
}

/*
 * Unload: the drivers have been released, except when the device is unbound through sysfs; removes
 * every mapping and detaches.
 */
void exi_endpoints_stop(struct exi_iommu *iommu)
{
	exi_send_deferred(iommu);
	eps_stop(iommu);
	bus_unregister_notifier(&pci_bus_type, &iommu->nb);
	stub_unregister(iommu);
}

/*
 * After the device was reset: frees the endpoints and binds the drivers again that this module
 * released. A kernel that reads VIOT itself defers them until an IOMMU driver is there.
 */
void exi_endpoints_free(struct exi_iommu *iommu)
{
	struct exi_ep *ep, *next;

	list_for_each_entry_safe(ep, next, &iommu->eps, link) {
		list_del(&ep->link);
		if (ep->reattach && !ep->removed && device_attach(ep->dev) <= 0)
			dev_info(ep->dev, "driver not bound again\n");
		WARN_ON(atomic_read(&ep->nmaps));
		ep_free(ep);
	}
	ida_destroy(&iommu->domains);
}
