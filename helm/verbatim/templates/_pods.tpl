{{/* Of an image's values: (list $ image). global.imageRegistry stands in for image.registry. */}}
{{- define "verbatim.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- include "verbatim.reference" (dict "registry" ($root.Values.global.imageRegistry | default $root.Values.image.registry) "image" $image "tag" ($image.tag | default $root.Chart.AppVersion)) -}}
{{- end -}}

{{/* Redis is not of the same registry as the project's images, unless a mirror has all. */}}
{{- define "verbatim.redisImage" -}}
{{- $image := .Values.redis.bundled.image -}}
{{- include "verbatim.reference" (dict "registry" .Values.global.imageRegistry "image" $image "tag" $image.tag) -}}
{{- end -}}

{{- define "verbatim.reference" -}}
{{- with .registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .image.repository }}:{{ .tag }}{{ with .image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{- define "verbatim.pullSecrets" -}}
{{- with concat .Values.image.pullSecrets .Values.global.imagePullSecrets }}
imagePullSecrets:
{{- range uniq . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A parent chart's globals are its own business; those of this chart have to mean something. */}}
{{- define "verbatim.checkGlobals" -}}
{{- if .Chart.IsRoot -}}
{{- range $name, $_ := .Values.global -}}
{{- if not (has $name (list "imageRegistry" "imagePullSecrets")) -}}
{{- fail (printf "global.%s: this chart has no such value; those it has are imageRegistry and imagePullSecrets" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "verbatim.podSecurity" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- with .Values.podSecurityContext }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "verbatim.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What a pod takes of one part's values: where it stands, and its priority. */}}
{{- define "verbatim.placing" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The metadata of a pod: (list $ part values) */}}
{{- define "verbatim.podMetadata" -}}
{{- $values := index . 2 -}}
labels:
  {{- include "verbatim.labels" (list (index . 0) (index . 1)) | nindent 2 }}
  {{- with $values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Containers of yours, each with what Pod Security Standards call restricted where it says nothing else. */}}
{{- define "verbatim.containers" -}}
{{- range . }}
- {{ toYaml (mustMerge (deepCopy .) (dict "securityContext" (dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL"))))) | nindent 2 | trim }}
{{- end }}
{{- end -}}

{{- define "verbatim.initContainers" -}}
{{- with .initContainers }}
initContainers: {{- include "verbatim.containers" . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables: settings, of which what is no text becomes JSON, and whatever Kubernetes takes. */}}
{{- define "verbatim.env" -}}
{{- range $name, $value := .env }}
- name: {{ $name }}
  value: {{ (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
