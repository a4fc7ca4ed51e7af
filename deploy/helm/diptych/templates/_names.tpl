{{- /* Names, labels, and what values mean together. */ -}}
{{- define "diptych.fullname" -}}
{{- if contains "diptych" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-diptych" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "diptych.selector" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .part }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- /* Of objects, never of pods: another version of the chart alone must not be another pod. */ -}}
{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: diptych
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- /* metadata of an object of this release: name with a part, labels with a component. */ -}}
{{- define "diptych.metadata" -}}
name: {{ include "diptych.fullname" .root }}-{{ .name | default .part }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "diptych.labels" . | nindent 2 }}
{{- end }}

{{- define "diptych.image" -}}
{{- $v := .root.Values -}}
{{ $v.image.repository }}:{{ .given.imageTag | default $v.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "diptych.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "diptych.fullname" .) }}
{{- end }}

{{- define "diptych.clusterSecretName" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "diptych.fullname" .)) }}
{{- end }}

{{- define "diptych.redisSecretName" -}}
{{- if .Values.redis.enabled -}}
{{ .Values.redis.passwordSecret | default (printf "%s-redis" (include "diptych.fullname" .)) }}
{{- else -}}
{{ .Values.redis.external.passwordSecret }}
{{- end }}
{{- end }}

{{- define "diptych.tlsSecretName" -}}
{{- if .Values.tls.certManager.enabled -}}
{{ .Values.tls.secretName | default (printf "%s-tls" (include "diptych.fullname" .)) }}
{{- else -}}
{{ .Values.tls.secretName }}
{{- end }}
{{- end }}

{{- define "diptych.modelDir" -}}
{{ .Values.model.path | default "/model/current" }}
{{- end }}

{{- /* What the schema cannot say: values that contradict each other. Rendered first, by every workload. */ -}}
{{- define "diptych.check" -}}
{{- $v := .Values -}}
{{- if and $v.redis.enabled $v.redis.external.url }}{{ fail "redis.enabled and redis.external.url: one or the other; set redis.enabled to false to use your own" }}{{ end -}}
{{- $shared := or $v.redis.enabled $v.redis.external.url -}}
{{- if and (not $shared) (gt (int $v.router.replicas) 1) }}{{ fail "router.replicas: more than 1 needs redis.enabled or redis.external.url, in which workers make themselves known to all of them" }}{{ end -}}
{{- if and $v.tls.enabled (not $v.tls.certManager.enabled) (not $v.tls.secretName) }}{{ fail "tls.enabled: needs tls.secretName or tls.certManager.enabled" }}{{ end -}}
{{- if and $v.tls.certManager.enabled (not $v.tls.enabled) }}{{ fail "tls.certManager.enabled: needs tls.enabled" }}{{ end -}}
{{- if and $v.tls.certManager.enabled (not $v.tls.certManager.issuerRef.name) }}{{ fail "tls.certManager.enabled: needs tls.certManager.issuerRef.name" }}{{ end -}}
{{- if and $v.tls.userSecretName (not $v.tls.enabled) }}{{ fail "tls.userSecretName: needs tls.enabled" }}{{ end -}}
{{- if and $v.tls.secretName (not $v.tls.enabled) }}{{ fail "tls.secretName: needs tls.enabled" }}{{ end -}}
{{- if and $v.clusterSecret.existingSecret (not $v.clusterSecret.enabled) }}{{ fail "clusterSecret.existingSecret: needs clusterSecret.enabled" }}{{ end -}}
{{- if and (or $v.networkPolicy.users $v.networkPolicy.egress.enabled) (not $v.networkPolicy.enabled) }}{{ fail "networkPolicy.users and networkPolicy.egress: need networkPolicy.enabled" }}{{ end -}}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.prometheusAddress) }}{{ fail "autoscaling.kind keda: needs autoscaling.prometheusAddress" }}{{ end -}}
{{- if and $v.model.volume.create $v.model.volume.existingClaim }}{{ fail "model.volume.create and model.volume.existingClaim: one or the other" }}{{ end -}}
{{- range list "prefill" "decode" -}}
{{- $scale := index $v.autoscaling . -}}
{{- if gt (int $scale.minReplicas) (int $scale.maxReplicas) }}{{ fail (printf "autoscaling.%s: minReplicas %v is more than maxReplicas %v" . $scale.minReplicas $scale.maxReplicas) }}{{ end -}}
{{- end -}}
{{- end }}
