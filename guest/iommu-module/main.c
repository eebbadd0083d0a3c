// SPDX-License-Identifier: GPL-2.0
/*
 * Module parameters, and the virtio device: features, configuration, start and end.
 */
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_ring.h>

#include "exitless-iommu.h"

/* The reply of a PROBE is this long at most; QEMU's is 512. */
#define EXI_PROBE_MAX (64 * 1024)

DEFINE_MUTEX(exi_control_lock);
DEFINE_MUTEX(exi_instances_lock);
LIST_HEAD(exi_instances);
static int exi_probe_error = -ENODEV;

static const char * const policy_names[] = {
	[EXI_REUSE_NONE] = "none",
	[EXI_REUSE_SHARED] = "shared",
	[EXI_REUSE_ASYNC] = "async",
	[EXI_REUSE_OPTIMISTIC] = "optimistic",
	[EXI_REUSE_RTC] = "rtc",
};
static int reuse = EXI_REUSE_NONE;

enum exi_reuse exi_policy(void)
{
	return READ_ONCE(reuse);
}

const char *exi_policy_name(enum exi_reuse policy)
{
	return policy_names[policy];
}

/* A lifetime must not outlast the policy that gave it: a change drops all stale mappings. */
static int reuse_set(const char *val, const struct kernel_param *kp)
{
	int policy = sysfs_match_string(policy_names, val);
	struct exi_iommu *iommu;
	struct exi_ep *ep;

	if (policy < 0)
		return policy;
	WRITE_ONCE(reuse, policy);
	mutex_lock(&exi_instances_lock);
	list_for_each_entry(iommu, &exi_instances, instance) {
		mutex_lock(&iommu->mutex);
		list_for_each_entry(ep, &iommu->eps, link)
			exi_drop_stale(ep);
		mutex_unlock(&iommu->mutex);
	}
	mutex_unlock(&exi_instances_lock);
	exi_rearm();
	return 0;
}

static int reuse_get(char *buf, const struct kernel_param *kp)
{
	return sysfs_emit(buf, "%s\n", exi_policy_name(exi_policy()));
}

static const struct kernel_param_ops reuse_ops = { .set = reuse_set, .get = reuse_get };
module_param_cb(reuse, &reuse_ops, NULL, 0644);
MODULE_PARM_DESC(reuse, "none (default), shared, async, optimistic or rtc: see README.md");

/* A number that the worker plans by: it plans anew when the number changes. */
static int planned_set(const char *val, const struct kernel_param *kp)
{
	int ret = param_set_uint(val, kp);

	if (!ret)
		exi_rearm();
	return ret;
}

static const struct kernel_param_ops planned_ops = { .set = planned_set, .get = param_get_uint };

unsigned int exi_quota = 4096;
module_param_cb(quota, &planned_ops, &exi_quota, 0644);
MODULE_PARM_DESC(quota, "stale mappings kept per endpoint (4096)");

unsigned int exi_residency_ms = 10000;
module_param_cb(residency_ms, &planned_ops, &exi_residency_ms, 0644);
MODULE_PARM_DESC(residency_ms, "optimistic: longest time a mapping stays after its release (10000)");

unsigned int exi_ttl_ms = 10000;
module_param_cb(ttl_ms, &planned_ops, &exi_ttl_ms, 0644);
MODULE_PARM_DESC(ttl_ms, "rtc: length of a cycle (10000)");

unsigned int exi_cycles = 3;
module_param_cb(cycles, &planned_ops, &exi_cycles, 0644);
MODULE_PARM_DESC(cycles, "rtc: whole cycles a mapping lives after the one of its first release (3)");

unsigned int exi_poll_us = 300000;
module_param_named(poll_us, exi_poll_us, uint, 0644);
MODULE_PARM_DESC(poll_us, "time after which a request is overdue (300000), see README.md");

static bool rebind;
module_param(rebind, bool, 0444);
MODULE_PARM_DESC(rebind, "1: take functions that already have a driver away from it and back (0)");

#ifdef EXITLESS_IOMMU_TEST
static bool mute;
module_param(mute, bool, 0644);
MODULE_PARM_DESC(mute, "test: never notify the device, as if it did not answer");

bool exi_muted(void)
{
	return READ_ONCE(mute);
}
#endif

/* Before features are accepted. */
static int exi_validate(struct virtio_device *vdev)
{
	/* Indirect descriptors would allocate memory for each request. */
	__virtio_clear_bit(vdev, VIRTIO_RING_F_INDIRECT_DESC);
	/* The IOMMU cannot translate its own accesses: with this bit its queues could fault. */
	__virtio_clear_bit(vdev, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

static int exi_read_config(struct exi_iommu *iommu)
{
	struct virtio_device *vdev = iommu->vdev;
	struct device *dev = &vdev->dev;
	u64 page_sizes;

	iommu->iova_last = EXI_IOVA_LAST;
	iommu->domain_last = INT_MAX;
	virtio_cread_le(vdev, struct virtio_iommu_config, page_size_mask, &page_sizes);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_INPUT_RANGE, struct virtio_iommu_config,
				input_range.start, &iommu->iova_first);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_INPUT_RANGE, struct virtio_iommu_config,
				input_range.end, &iommu->iova_last);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_DOMAIN_RANGE, struct virtio_iommu_config,
				domain_range.start, &iommu->domain_first);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_DOMAIN_RANGE, struct virtio_iommu_config,
				domain_range.end, &iommu->domain_last);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_PROBE, struct virtio_iommu_config,
				probe_size, &iommu->probe_size);
	iommu->has_mmio = virtio_has_feature(vdev, VIRTIO_IOMMU_F_MMIO);
	iommu->iova_last = min_t(u64, iommu->iova_last, EXI_IOVA_LAST);
	iommu->domain_last = min_t(u32, iommu->domain_last, INT_MAX);

	/* The least bit is the granularity of mappings: a page must be a multiple of it. */
	if (!page_sizes || (page_sizes & -page_sizes) > PAGE_SIZE) {
		dev_err(dev, "page sizes %#llx: none of at most %lu bytes\n", page_sizes,
			PAGE_SIZE);
		return -EINVAL;
	}
	if (iommu->iova_first + 2 * PAGE_SIZE > iommu->iova_last ||
	    iommu->iova_first > EXI_IOVA_LAST) {
		dev_err(dev, "input range is empty\n");
		return -EINVAL;
	}
	if (iommu->domain_first > iommu->domain_last) {
		dev_err(dev, "domain range is empty\n");
		return -EINVAL;
	}
	if (iommu->probe_size > EXI_PROBE_MAX) {
		dev_err(dev, "probe_size %u is more than %u\n", iommu->probe_size, EXI_PROBE_MAX);
		return -EINVAL;
	}
	return 0;
}

static int exi_find_vqs(struct exi_iommu *iommu)
{
	/* The request queue has no callback: it is polled. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
	struct virtqueue_info info[] = {
		{ .name = "request" },
		{ .name = "event", .callback = exi_event_interrupt },
	};

	return virtio_find_vqs(iommu->vdev, ARRAY_SIZE(info), iommu->vqs, info, NULL);
#else
	static const char * const names[] = { "request", "event" };
	vq_callback_t *callbacks[] = { NULL, exi_event_interrupt };

	return virtio_find_vqs(iommu->vdev, ARRAY_SIZE(names), iommu->vqs, callbacks, names, NULL);
#endif
}

static struct exi_iommu *exi_alloc_iommu(struct virtio_device *vdev)
{
	struct exi_iommu *iommu = kzalloc(sizeof(*iommu), GFP_KERNEL);

	if (!iommu)
		return NULL;
	iommu->wq = alloc_workqueue("exitless-iommu", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!iommu->wq) {
		kfree(iommu);
		return NULL;
	}
	iommu->vdev = vdev;
	iommu->pdev = to_pci_dev(vdev->dev.parent);
	mutex_init(&iommu->mutex);
	spin_lock_init(&iommu->vq_lock);
	ida_init(&iommu->domains);
	INIT_LIST_HEAD(&iommu->eps);
	INIT_LIST_HEAD(&iommu->deferred);
	INIT_LIST_HEAD(&iommu->lost);
	INIT_DELAYED_WORK(&iommu->work, exi_work_fn);
	INIT_DELAYED_WORK(&iommu->kick_work, exi_kick_fn);
	INIT_WORK(&iommu->event_work, exi_event_fn);
	return iommu;
}

static void exi_free_iommu(struct exi_iommu *iommu)
{
	destroy_workqueue(iommu->wq);
	kfree(iommu->ranges);
	kfree(iommu->events);
	kfree(iommu);
}

/* Ends the use of the queues; from here on no slot and no event buffer is with the device. */
static void exi_stop_device(struct exi_iommu *iommu)
{
	virtio_reset_device(iommu->vdev);
	cancel_work_sync(&iommu->event_work);
	iommu->vdev->config->del_vqs(iommu->vdev);
	exi_requests_release(iommu);
}

/* For good once no driver uses an endpoint: a call may have queued some before it saw closing. */
static void exi_cancel_work(struct exi_iommu *iommu)
{
	cancel_delayed_work_sync(&iommu->work);
	cancel_delayed_work_sync(&iommu->kick_work);
}

static int exi_probe(struct virtio_device *vdev)
{
	struct exi_iommu *iommu;
	int ret;

	if (!dev_is_pci(vdev->dev.parent)) {
		dev_err(&vdev->dev, "only the PCI transport is supported\n");
		return exi_probe_error = -ENODEV;
	}
	/* 5.13.5: drivers verify the one mode of operation that there is. */
	if (!virtio_has_feature(vdev, VIRTIO_IOMMU_F_MAP_UNMAP)) {
		dev_err(&vdev->dev, "device does not offer MAP and UNMAP\n");
		return exi_probe_error = -ENODEV;
	}
	iommu = exi_alloc_iommu(vdev);
	if (!iommu)
		return exi_probe_error = -ENOMEM;
	vdev->priv = iommu;
	ret = exi_viot_read(iommu) ?: exi_read_config(iommu) ?: exi_find_vqs(iommu);
	if (ret)
		goto err_free;
	ret = exi_requests_init(iommu) ?: exi_events_fill(iommu);
	if (ret)
		goto err_stop;
	virtio_device_ready(vdev);
	virtqueue_kick(iommu->vqs[1]);
	ret = exi_endpoints_start(iommu);
	if (ret)
		goto err_stop;
	mutex_lock(&exi_control_lock);
	mutex_lock(&exi_instances_lock);
	list_add_tail(&iommu->instance, &exi_instances);
	mutex_unlock(&exi_instances_lock);
	exi_take_bound(iommu, rebind);
	mutex_unlock(&exi_control_lock);
	dev_info(&vdev->dev, "addresses up to %#llx, %u requests at once, reuse %s\n",
		 iommu->iova_last, iommu->nslots, exi_policy_name(exi_policy()));
	return 0;

err_stop:
	exi_cancel_work(iommu);
	exi_stop_device(iommu);
	exi_endpoints_free(iommu);
err_free:
	exi_free_iommu(iommu);
	dev_err(&vdev->dev, "not started: %d\n", ret);
	return exi_probe_error = ret;
}

static void exi_remove(struct virtio_device *vdev)
{
	struct exi_iommu *iommu = vdev->priv;

	mutex_lock(&exi_control_lock);
	mutex_lock(&exi_instances_lock);
	list_del(&iommu->instance);
	mutex_unlock(&exi_instances_lock);
	mutex_unlock(&exi_control_lock);
	exi_close(iommu);
	cancel_delayed_work_sync(&iommu->work);
	exi_endpoints_stop(iommu);
	exi_cancel_work(iommu);
	exi_stop_device(iommu);
	exi_endpoints_free(iommu);
	exi_free_iommu(iommu);
}

#ifdef CONFIG_PM_SLEEP
/* Suspend would lose the domains and mappings; nothing brings them back. */
static int exi_freeze(struct virtio_device *vdev)
{
	return -EOPNOTSUPP;
}
#endif

static const unsigned int exi_features[] = {
	VIRTIO_IOMMU_F_INPUT_RANGE,
	VIRTIO_IOMMU_F_DOMAIN_RANGE,
	VIRTIO_IOMMU_F_MAP_UNMAP,
	VIRTIO_IOMMU_F_PROBE,
	VIRTIO_IOMMU_F_MMIO,
	VIRTIO_IOMMU_F_BYPASS_CONFIG,
};

static const struct virtio_device_id exi_ids[] = {
	{ VIRTIO_ID_IOMMU, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, exi_ids);

static struct virtio_driver exi_driver = {
	.driver.name = "exitless-iommu",
	.driver.owner = THIS_MODULE,
	.driver.groups = exi_driver_groups,
	.id_table = exi_ids,
	.feature_table = exi_features,
	.feature_table_size = ARRAY_SIZE(exi_features),
	.validate = exi_validate,
	.probe = exi_probe,
	.remove = exi_remove,
#ifdef CONFIG_PM_SLEEP
	.freeze = exi_freeze,
#endif
};

static int __init exi_init(void)
{
	int ret = iova_cache_get();

	if (ret)
		return ret;
	exi_map_cache = KMEM_CACHE(exi_map, 0);
	if (!exi_map_cache) {
		ret = -ENOMEM;
		goto err_iova;
	}
	exi_debugfs_init();
	ret = register_virtio_driver(&exi_driver);
	if (ret)
		goto err_cache;
	if (list_empty(&exi_instances)) {
		ret = exi_probe_error;
		if (ret == -ENODEV)
			pr_err("exitless-iommu: no usable virtio-iommu device: none on PCI without another driver\n");
		unregister_virtio_driver(&exi_driver);
		goto err_cache;
	}
	return 0;

err_cache:
	exi_debugfs_exit();
	kmem_cache_destroy(exi_map_cache);
err_iova:
	iova_cache_put();
	return ret;
}

static void __exit exi_exit(void)
{
	exi_debugfs_exit();
	unregister_virtio_driver(&exi_driver);
	kmem_cache_destroy(exi_map_cache);
	iova_cache_put();
}

module_init(exi_init);
module_exit(exi_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
MODULE_DESCRIPTION("virtio-iommu driver with per-endpoint DMA operations and mapping reuse");
