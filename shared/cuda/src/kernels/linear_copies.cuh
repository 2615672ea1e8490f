// Instructions of the linear layers' kernels: barriers and copies into shared memory, and a cluster's shared memory.

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Lets the copy engine see initialised barriers.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Weights that one pass reads once should not push activations and the KV cache out of the L2 cache.
__device__ __forceinline__ u64 weight_policy(bool read_once) {
    u64 first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return read_once ? first : normal;
}

__device__ __forceinline__ void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            target),
        "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void lane_copy(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(__cvta_generic_to_global(source))
                 : "memory");
}

__device__ __forceinline__ void lane_copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a group of this lane's copies.
__device__ __forceinline__ void lane_copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more than the last `groups` are on their way; fewer where that is a large number.
__device__ __forceinline__ void lane_copies_wait(u32 groups) {
    if (groups == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
    else if (groups == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else if (groups == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (groups < 6) asm volatile("cp.async.wait_group 3;" ::: "memory");
    else asm volatile("cp.async.wait_group 6;" ::: "memory");
}

__device__ __forceinline__ uint4 load_fragment(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Publishes what this thread and, behind a block barrier, its block wrote.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Says only that this thread has come here.
__device__ __forceinline__ void cluster_pass() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The shared memory of block `rank` of the cluster at the place of `address` in ours.
__device__ __forceinline__ u32 address_in_rank(u32 address, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ __forceinline__ float4 load_remote(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address));
    return v;
}

