#!/bin/bash
# One run on eight machines under Kubernetes: engines, the service with its store, nodes, a trainer.
#
#   REGISTRY=registry.example.com/rl bash examples/clusters/kubernetes.sh        # from a clone; images as in docs/deploy.md
#
#                                                          scale it by
#   engines    7 machines x 8 GPUs, one GPU each: 56        calls in flight: about 64 for each engine; a larger model takes
#                                                           vllm.tensorParallelSize, as many GPUs, and fewer replicas
#   rollouts   8 nodes x 96 at once: 768                    cores: each is a pod of what its task asks for, one core and 2 GB here;
#                                                           nodes are small themselves, their pods run wherever there is room
#   proxies    2, of one core each                          calls/s: one proxy for about 85 (docs/deploy.md, Sizing)
#   Redis      8 GiB                                        sessions kept: 1 GB for 1,000 of 50 turns; python -m benchmarks.capacity
#   trainer    one GPU of the eighth machine                your trainer (docs/trainers.md): it leases, steps and publishes alike
#
# Needs a storage class with ReadWriteMany, the GPU operator, and a network that enforces NetworkPolicies.
set -euo pipefail

REGISTRY=${REGISTRY:?where the images are}
NAMESPACE=${NAMESPACE:-rl}
MODEL=${MODEL:-Qwen/Qwen3-1.7B}
SHARED=${SHARED:-shared}          # the storage class with ReadWriteMany
TASKS=${TASKS:-tasks.jsonl}       # one task per line, with runtime {"kind": "kubernetes", "image": ...} (docs/tasks.md)
STEPS=${STEPS:-200}

# 1. Secrets. Once made they stay.
kubectl create namespace "$NAMESPACE" --dry-run=client -o yaml | kubectl apply -f -
if ! kubectl -n "$NAMESPACE" get secret verbatim-tokens > /dev/null; then
  node=$(openssl rand -hex 32)
  kubectl -n "$NAMESPACE" create secret generic verbatim-tokens --from-literal=node-tokens="$node" --from-literal=node-token="$node" \
    --from-literal=admin-tokens="$(openssl rand -hex 32)" --from-literal=trainer-tokens="$(openssl rand -hex 32)"
  kubectl -n "$NAMESPACE" create secret generic verbatim-redis --from-literal=password="$(openssl rand -hex 32)"
fi

# 2. One volume for the model. The first engine downloads it; the others wait for its lock and find it there.
kubectl apply -n "$NAMESPACE" -f - <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: models}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: $SHARED
  resources: {requests: {storage: 500Gi}}
END

# 3. Service, store, engines and nodes.
helm upgrade --install verbatim helm/verbatim -n "$NAMESPACE" -f - <<END
image: {registry: $REGISTRY}
proxy: {replicas: 2}
redis:
  bundled: {backup: {enabled: true}}
vllm:
  model: $MODEL
  replicas: 56
  maxModelLen: 32768
  cache: {existingClaim: models}
  resources:
    requests: {cpu: "4", memory: 32Gi}
    limits: {cpu: "16", memory: 64Gi, nvidia.com/gpu: 1}
weights: {storageClass: $SHARED, size: 500Gi}
nodes:
  replicas: 8
  slots: {run: 96, prepare: 8, ready: 8, evaluate: 16}
  capacity: {cpus: 96, memoryMb: 196608}
runtimes:
  quota: {pods: "1000", limits.cpu: "1000", limits.memory: 2Ti}
monitoring:
  serviceMonitor: {enabled: false}   # with the Prometheus operator: true, and alerts and dashboard
END
kubectl -n "$NAMESPACE" rollout status statefulset/verbatim-vllm --timeout=1h
helm test verbatim -n "$NAMESPACE"

# 4. Tasks, from this machine.
kubectl -n "$NAMESPACE" port-forward service/verbatim-proxy 8701 &
forward=$!
trap 'kill $forward 2> /dev/null || true' EXIT
export VERBATIM_URL=http://127.0.0.1:8701
VERBATIM_ADMIN_TOKEN=$(kubectl -n "$NAMESPACE" get secret verbatim-tokens -o jsonpath='{.data.admin-tokens}' | base64 -d)
export VERBATIM_ADMIN_TOKEN
until curl -sf -o /dev/null "$VERBATIM_URL/readyz"; do sleep 1; done
verbatim tasks submit "$TASKS"

# 5. The trainer, with the engines' volume of weights. It leases what is complete, steps, publishes to all engines, acknowledges.
kubectl apply -n "$NAMESPACE" -f - <<END
apiVersion: batch/v1
kind: Job
metadata: {name: trainer}
spec:
  backoffLimit: 20
  template:
    spec:
      restartPolicy: OnFailure
      securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: trainer
          image: $REGISTRY/verbatim-trainer:0.1.0
          args: [--model, $MODEL, --weights, /weights, --steps, "$STEPS"]
          env:
            - {name: VERBATIM_URL, value: http://verbatim-proxy:8701}
            - name: VERBATIM_TRAINER_TOKEN
              valueFrom: {secretKeyRef: {name: verbatim-tokens, key: trainer-tokens}}
          resources:
            requests: {cpu: "8", memory: 64Gi}
            limits: {memory: 128Gi, nvidia.com/gpu: 1}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
          volumeMounts:
            - {name: weights, mountPath: /weights}
            - {name: models, mountPath: /cache}
      volumes:
        - name: weights
          persistentVolumeClaim: {claimName: verbatim-weights}
        - name: models
          persistentVolumeClaim: {claimName: models}
END
kubectl -n "$NAMESPACE" logs --follow job/trainer --pod-running-timeout=30m
