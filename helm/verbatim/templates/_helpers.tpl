{{- define "verbatim.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "verbatim.fullname" -}}
{{- $name := include "verbatim.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* A name of one part: (list $ "proxy") */}}
{{- define "verbatim.part" -}}
{{- printf "%s-%s" (include "verbatim.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{- define "verbatim.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "verbatim.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "verbatim.labels" -}}
{{- $root := index . 0 -}}
{{ include "verbatim.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "verbatim.runtimeNamespace" -}}
{{- default (printf "%s-runtimes" .Release.Namespace) .Values.runtimes.namespace -}}
{{- end -}}

{{/* What every pod of a rollout gets, as JSON; {} for nothing. */}}
{{- define "verbatim.podFields" -}}
{{- $fields := dict -}}
{{- with .Values.runtimes -}}
{{- $given := dict "annotations" .podAnnotations "nodeSelector" .nodeSelector "tolerations" .tolerations "runtimeClassName" .runtimeClassName "priorityClassName" .priorityClassName -}}
{{- range $name, $value := $given }}{{ if $value }}{{ $_ := set $fields $name $value }}{{ end }}{{ end -}}
{{- end -}}
{{- toJson $fields -}}
{{- end -}}

{{/* VERBATIM_REDIS, and before it what its value is made of. */}}
{{- define "verbatim.redisEnv" -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "bundled" }}
{{- if .Values.redis.waitReplicas -}}
{{- fail "redis.waitReplicas: the bundled Redis has no replicas, and every call would wait for them in vain" -}}
{{- end }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.bundled.existingSecret }}, key: {{ .Values.redis.bundled.key }}}}
- name: VERBATIM_REDIS
  value: redis://:$(REDIS_PASSWORD)@{{ include "verbatim.part" (list . "redis") }}:6379/0
{{- else if $external.urlSecret.name }}
- name: VERBATIM_REDIS
  valueFrom: {secretKeyRef: {name: {{ $external.urlSecret.name }}, key: {{ $external.urlSecret.key }}}}
{{- else }}
{{- if $external.passwordSecret.name }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $external.passwordSecret.name }}, key: {{ $external.passwordSecret.key }}}}
{{- end }}
- name: VERBATIM_REDIS
  value: {{ include "verbatim.redisUrl" . | quote }}
{{- end }}
{{- end -}}

{{- define "verbatim.redisUrl" -}}
{{- $external := .Values.redis.external -}}
{{- $kind := $external.kind -}}
{{- if not $external.hosts -}}
{{- fail "redis.external.hosts: say where your Redis is, or name a Secret with its URL (redis.external.urlSecret)" -}}
{{- end -}}
{{- if and (eq $kind "sentinel") (not $external.service) -}}
{{- fail "redis.external.service: say what the Sentinels call the master" -}}
{{- end -}}
{{- if and (ne $kind "sentinel") $external.service -}}
{{- fail "redis.external.service: only Sentinels have services" -}}
{{- end -}}
{{- if and (eq $kind "cluster") $external.database -}}
{{- fail "redis.external.database: a cluster has the one database 0" -}}
{{- end -}}
{{- $external.tls | ternary "rediss" "redis" -}}{{- ne $kind "single" | ternary (printf "+%s" $kind) "" -}}://
{{- if $external.passwordSecret.name -}}{{ $external.username }}:$(REDIS_PASSWORD)@{{- end -}}
{{- join "," $external.hosts -}}
{{- if eq $kind "single" -}}/{{ $external.database }}{{- else if eq $kind "sentinel" -}}/{{ $external.service }}/{{ $external.database }}{{- end -}}
{{- $client := $external.clientCertSecret -}}
{{- if and (or $external.caSecret.name $client.name) (not $external.tls) -}}
{{- fail "redis.external.tls: set it to true, or caSecret and clientCertSecret have no effect" -}}
{{- end -}}
{{- $options := list -}}
{{- if $external.caSecret.name }}{{ $options = append $options (printf "ssl_ca_certs=/etc/verbatim/redis/%s" $external.caSecret.key) }}{{ end -}}
{{- if $client.name }}{{ $options = concat $options (list (printf "ssl_certfile=/etc/verbatim/redis/%s" $client.certKey) (printf "ssl_keyfile=/etc/verbatim/redis/%s" $client.keyKey)) }}{{ end -}}
{{- with $options }}?{{ join "&" . }}{{ end -}}
{{- end -}}

{{/* The Secrets with certificates for an external Redis, in one folder, as items of a projected volume; empty if there are none. */}}
{{- define "verbatim.redisSecrets" -}}
{{- if eq .Values.redis.mode "external" -}}
{{- with .Values.redis.external }}
{{- if .caSecret.name }}
- secret: {name: {{ .caSecret.name }}, items: [{key: {{ .caSecret.key }}, path: {{ .caSecret.key }}}]}
{{- end }}
{{- with .clientCertSecret }}{{ if .name }}
- secret: {name: {{ .name }}, items: [{key: {{ .certKey }}, path: {{ .certKey }}}, {key: {{ .keyKey }}, path: {{ .keyKey }}}]}
{{- end }}{{ end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The chart's own engines, as JSON: each part's name with its values, and `policy`, which is empty for the first. */}}
{{- define "verbatim.models" -}}
{{- $models := dict -}}
{{- if .Values.vllm.enabled -}}
{{- $shared := omit .Values.vllm "extraModels" -}}
{{- $_ := set $models "vllm" (set (deepCopy $shared) "policy" "") -}}
{{- range $name, $own := .Values.vllm.extraModels -}}
{{- $part := printf "vllm-%s" $name -}}
{{- if gt (len (include "verbatim.part" (list $ $part))) 52 -}}
{{- fail (printf "vllm.extraModels.%s: with the release's name it is too long for a StatefulSet; shorten one of them" $name) -}}
{{- end -}}
{{- $_ := set $models $part (mustMergeOverwrite (deepCopy $shared) (dict "servedModelName" $name) (deepCopy $own) (dict "policy" $name)) -}}
{{- end -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{- define "verbatim.engines" -}}
{{- $engines := list -}}
{{- range $part, $model := include "verbatim.models" . | fromJson -}}
{{- $named := ne $model.policy "" | ternary (printf "%s=" $model.policy) "" -}}
{{- $engines = append $engines (printf "%sdns://%s.%s.svc:8000" $named (include "verbatim.part" (list $ $part)) $.Release.Namespace) -}}
{{- end -}}
{{- toJson (concat $engines .Values.engines) -}}
{{- end -}}

{{- define "verbatim.weightsClaim" -}}
{{- default (include "verbatim.part" (list . "weights")) .Values.weights.existingClaim -}}
{{- end -}}

{{/* As nodes in the same namespace see the proxy's Service: by the variable that Kubernetes sets for it. */}}
{{- define "verbatim.serviceVariable" -}}
{{- include "verbatim.part" (list . "proxy") | upper | replace "-" "_" -}}_SERVICE_HOST
{{- end -}}

{{/* One side of the service as nodes call it: (list $ givenUrl port) */}}
{{- define "verbatim.nodeUrl" -}}
{{- $root := index . 0 -}}
{{- if index . 1 -}}
{{- index . 1 -}}
{{- else -}}
{{- $host := printf "$(%s)" (include "verbatim.serviceVariable" $root) -}}
http://{{ eq $root.Values.ipFamily "IPv6" | ternary (printf "[%s]" $host) $host }}:{{ index . 2 }}
{{- end -}}
{{- end -}}

{{/* What is public, by the port that serves it: (list $ whetherControl). Without /metrics and /readyz, which carry no token. */}}
{{- define "verbatim.publicPaths" -}}
http: [/r, /s, /v1, /v1beta, /v1alpha]
{{- if index . 1 }}
control: [/attempts, /batches, /engines, /groups, /nodes, /projects, /run, /runs, /sessions, /tasks, /ui, /weights]
{{- end }}
{{- end -}}

{{/* NetworkPolicyPeers of each side of the service, beside this namespace: those named, and those that the chart's own objects bring in. */}}
{{- define "verbatim.proxyPeers" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $harness := concat $policy.proxyFrom $policy.harnessFrom -}}
{{- $control := $policy.proxyFrom -}}
{{- if and (ne .Values.proxy.service.type "ClusterIP") (not $harness) -}}
{{- fail (printf "networkPolicy.harnessFrom: proxy.service.type is %s, and the network policy shuts out whoever comes from outside; name their addresses, for example [{ipBlock: {cidr: 10.0.0.0/8}}] (networkPolicy.proxyFrom: for the control side, too)" .Values.proxy.service.type) -}}
{{- end -}}
{{- with .Values.ingress }}{{ if .enabled -}}
{{- $peers := $policy.ingressFrom -}}
{{- if and (not $peers) (eq .className "nginx") -}}
{{- $peers = list (dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" "ingress-nginx"))) -}}
{{- end -}}
{{- if not $peers -}}
{{- fail (printf "networkPolicy.ingressFrom: name where the ingress controller of the class %s runs, or the network policy shuts it out, for example [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}}}]" .className) -}}
{{- end -}}
{{- $harness = concat $harness $peers -}}
{{- if .control }}{{ $control = concat $control $peers }}{{ end -}}
{{- end }}{{ end -}}
{{- with .Values.httpRoute }}{{ if .enabled -}}
{{- if not $policy.gatewayFrom -}}
{{- fail "networkPolicy.gatewayFrom: name where the pods of the gateway run, or the network policy shuts them out, for example [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: envoy-gateway-system}}}]" -}}
{{- end -}}
{{- $harness = concat $harness $policy.gatewayFrom -}}
{{- if .control }}{{ $control = concat $control $policy.gatewayFrom }}{{ end -}}
{{- end }}{{ end -}}
{{- if .Values.monitoring.serviceMonitor.enabled -}}
{{- $prometheus := dict "namespaceSelector" dict "podSelector" (dict "matchLabels" (dict "app.kubernetes.io/name" "prometheus")) -}}
{{- $control = concat $control ($policy.prometheusFrom | default (list $prometheus)) -}}
{{- end -}}
{{- dict "harness" $harness "control" $control | toJson -}}
{{- end -}}

{{/* NetworkPolicyPeers of the engines beside the proxies. */}}
{{- define "verbatim.enginePeers" -}}
{{- $peers := .Values.networkPolicy.vllmFrom -}}
{{- with .Values.monitoring.serviceMonitor }}{{ if and .enabled .engines -}}
{{- if not (or $peers $.Values.networkPolicy.prometheusFrom) -}}
{{- fail "networkPolicy.prometheusFrom: name the pods of Prometheus, or monitoring.serviceMonitor.engines scrapes nothing; the engines' routes are unauthenticated, so name no others, for example [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}, podSelector: {matchLabels: {app.kubernetes.io/name: prometheus}}}]" -}}
{{- end -}}
{{- $peers = concat $peers $.Values.networkPolicy.prometheusFrom -}}
{{- end }}{{ end -}}
{{- dict "peers" $peers | toJson -}}
{{- end -}}

{{/* Every address of pods. */}}
{{- define "verbatim.anyAddress" -}}
{{- eq .Values.ipFamily "IPv6" | ternary "::" "0.0.0.0" -}}
{{- end -}}

{{/* Of each family that has some: (all of its addresses: [private ones]). */}}
{{- define "verbatim.privateAddresses" -}}
{{- $families := dict "0.0.0.0/0" list -}}
{{- range .Values.runtimes.privateAddresses -}}
{{- $all := contains ":" . | ternary "::/0" "0.0.0.0/0" -}}
{{- $_ := set $families $all (append (get $families $all | default list) .) -}}
{{- end -}}
{{- toYaml $families -}}
{{- end -}}

{{/* A selector of the series of this release's proxies; those of another one show other numbers. */}}
{{- define "verbatim.ownProxies" -}}
{{- printf `namespace=%q, pod=~"%s-[a-z0-9]+-[a-z0-9]+"` .Release.Namespace (include "verbatim.part" (list . "proxy")) -}}
{{- end -}}

{{/* (dict "root" $ "part" … "keda" values "kind" … "query" … "threshold" of a replica) */}}
{{- define "verbatim.scaledObject" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "verbatim.part" (list .root .part) }}
  labels: {{- include "verbatim.labels" (list .root .part) | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ include "verbatim.part" (list .root .part) }}}
  minReplicaCount: {{ .keda.minReplicas }}
  maxReplicaCount: {{ .keda.maxReplicas }}
  pollingInterval: 15
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          # Work comes in waves: what goes in every lull would drain for nothing.
          stabilizationWindowSeconds: 900
          policies: [{type: Pods, value: 1, periodSeconds: 60}]
  triggers:
    - type: prometheus
      metadata:
        serverAddress: {{ .keda.prometheusUrl | quote }}
        query: {{ .query | quote }}
        threshold: {{ .threshold | int | quote }}
{{- end }}
