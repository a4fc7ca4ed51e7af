{{- /* Names, labels, and what values mean together. */ -}}
{{- define "diptych.fullname" -}}
{{- /* A Service's name has no dots and begins with a letter; a release's may be 1.2. */ -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if not (contains "diptych" $name) }}{{ $name = printf "%s-diptych" $name }}{{ end -}}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "r%s" $name }}{{ end -}}
{{ $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "diptych.selector" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .part }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- /* Of objects, never of pods: another version of the chart alone must not be another pod. */ -}}
{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: diptych
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- /* metadata of an object of this release: name with a part, labels with a component. */ -}}
{{- define "diptych.metadata" -}}
name: {{ printf "%s-%s" (include "diptych.fullname" .root) (.name | default .part) | quote }}
namespace: {{ .root.Release.Namespace | quote }}
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

{{- /* Bytes, or thousandths of cores, of a quantity as Kubernetes or our flags write it. */ -}}
{{- define "diptych.number" -}}
{{- $units := dict "" 1.0 "m" 0.001 "B" 1.0 "k" 1e3 "KB" 1e3 "M" 1e6 "MB" 1e6 "G" 1e9 "GB" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "KiB" 1024.0 "Mi" 1048576.0 "MiB" 1048576.0 "Gi" 1073741824.0 "GiB" 1073741824.0 "Ti" 1099511627776.0 "TiB" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $said := toString . -}}
{{- if regexMatch "[eE][+-]?[0-9]+$" $said -}}
{{- /* A large number, as Go writes it: 3e+10. */ -}}
{{- mulf (float64 $said) 1000 -}}
{{- else -}}
{{- mulf (regexFind "^[0-9.]+" $said | float64) (index $units (regexFind "[A-Za-z]*$" $said)) 1000 -}}
{{- end -}}
{{- end }}

{{- /* Of one pool; nothing: what its GPU has left. */ -}}
{{- define "diptych.kvMemory" -}}
{{- if .kvMemory }}{{ .kvMemory }}{{ else if eq (int .gpu.count) 0 }}1GiB{{ end -}}
{{- end }}

{{- /* Probes, policies and Services go by what values say: a flag that says something else would be believed by one side only. */ -}}
{{- define "diptych.checkArgs" -}}
{{- $own := list "model" "served-name" "host" "http-port" "grpc-port" "worker-port" "worker-id" "advertise" "port" "kv-port" "metrics-port" "threads" "kv-memory" "device" "drain-timeout" "log-level" -}}
{{- range .args -}}
{{- $flag := regexFind "^[a-z-]+" (trimPrefix "--" .) -}}
{{- if has $flag $own }}{{ fail (printf "%s: --%s follows from a value of the chart (values.yaml), say that one" $.of $flag) }}{{ end -}}
{{- end -}}
{{- end }}

{{- /* An API server takes a name twice from some, and not from others. */ -}}
{{- define "diptych.checkEnv" -}}
{{- $taken := dict -}}
{{- range .own }}{{ $_ := set $taken . "the chart" }}{{ end -}}
{{- range $of, $env := .envs -}}
{{- range $env -}}
{{- if hasKey $taken .name }}{{ fail (printf "%s: %s is already said by %s" $of .name (get $taken .name)) }}{{ end -}}
{{- $_ := set $taken .name $of -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "diptych.checkPorts" -}}
{{- $taken := dict -}}
{{- range .names -}}
{{- $port := int (index $.ports .) | toString -}}
{{- if hasKey $taken $port }}{{ fail (printf "ports.%s and ports.%s: both are %s, and %s listen at both" (get $taken $port) . $port $.of) }}{{ end -}}
{{- $_ := set $taken $port . -}}
{{- end -}}
{{- end }}

{{- /* Quantities as Kubernetes reads them whatever they were written as: 0.5, "500m", 30000000000. */ -}}
{{- define "diptych.quantities" -}}
{{- range $what, $much := . }}
{{- $said := toString $much }}
{{ $what }}: {{ if regexMatch "[eE][+-]?[0-9]+$" $said }}{{ printf "%.0f" (float64 $said) | quote }}{{ else }}{{ $said | quote }}{{ end }}
{{- end }}
{{- end }}

{{- define "diptych.resources" -}}
requests: {{- include "diptych.quantities" .requests | nindent 2 }}
limits: {{- include "diptych.quantities" .limits | nindent 2 }}
{{- end }}

{{- define "diptych.checkResources" -}}
{{- range $what, $asked := .resources.requests -}}
{{- $limit := index $.resources.limits $what -}}
{{- if and $limit (gt (include "diptych.number" $asked | float64) (include "diptych.number" $limit | float64)) }}{{ fail (printf "%s.resources: requests.%s %v is more than limits.%s %v" $.of $what $asked $what $limit) }}{{ end -}}
{{- end -}}
{{- end }}

{{- /* A device has memory of its own for KV; without one KV and weights are in the container's. */ -}}
{{- define "diptych.checkPool" -}}
{{- $pool := .pool -}}
{{- include "diptych.checkResources" (dict "of" .of "resources" $pool.resources) -}}
{{- $limit := $pool.resources.limits.memory -}}
{{- if and (eq (int $pool.gpu.count) 0) (ge (include "diptych.number" (include "diptych.kvMemory" $pool) | float64) (include "diptych.number" $limit | float64)) }}{{ fail (printf "%s.kvMemory: %s does not fit into %s.resources.limits.memory %v, in which the model's weights must be as well: docs/operations.md has the sum" .of (include "diptych.kvMemory" $pool) .of $limit) }}{{ end -}}
{{- $none := list "0" "0%" -}}
{{- if and (has (toString $pool.rollout.maxSurge) $none) (has (toString $pool.rollout.maxUnavailable) $none) }}{{ fail (printf "%s.rollout: with maxSurge and maxUnavailable both 0 no pod could ever be replaced; with maxSurge 0 say maxUnavailable: 1, too" .of) }}{{ end -}}
{{- end }}

{{- /* What the schema cannot say: values that contradict each other. Rendered first, by every workload. */ -}}
{{- define "diptych.check" -}}
{{- $v := .Values -}}
{{- if and $v.redis.enabled $v.redis.external.url }}{{ fail "redis.enabled and redis.external.url: one or the other; set redis.enabled to false to use your own" }}{{ end -}}
{{- $shared := or $v.redis.enabled $v.redis.external.url -}}
{{- if and (not $shared) (gt (int $v.router.replicas) 1) }}{{ fail "router.replicas: more than 1 needs redis.enabled or redis.external.url, in which workers make themselves known to all of them" }}{{ end -}}
{{- if and (not $v.redis.enabled) $v.redis.passwordSecret }}{{ fail "redis.passwordSecret: is of redis.enabled; your own Redis has redis.external.passwordSecret" }}{{ end -}}
{{- if and (not $v.redis.external.url) (or $v.redis.external.passwordSecret $v.redis.external.caSecret) }}{{ fail "redis.external.passwordSecret and redis.external.caSecret: need redis.external.url" }}{{ end -}}
{{- if and $v.redis.external.caSecret (not (hasPrefix "rediss://" $v.redis.external.url)) }}{{ fail "redis.external.caSecret: needs a redis.external.url of rediss://" }}{{ end -}}
{{- if and $v.tls.enabled (not $v.tls.certManager.enabled) (not $v.tls.secretName) }}{{ fail "tls.enabled: needs tls.secretName or tls.certManager.enabled" }}{{ end -}}
{{- if and $v.tls.certManager.enabled (not $v.tls.enabled) }}{{ fail "tls.certManager.enabled: needs tls.enabled" }}{{ end -}}
{{- if and $v.tls.certManager.enabled (not $v.tls.certManager.issuerRef.name) }}{{ fail "tls.certManager.enabled: needs tls.certManager.issuerRef.name" }}{{ end -}}
{{- if and $v.tls.userSecretName (not $v.tls.enabled) }}{{ fail "tls.userSecretName: needs tls.enabled" }}{{ end -}}
{{- if and $v.tls.secretName (not $v.tls.enabled) }}{{ fail "tls.secretName: needs tls.enabled" }}{{ end -}}
{{- if and $v.clusterSecret.existingSecret (not $v.clusterSecret.enabled) }}{{ fail "clusterSecret.existingSecret: needs clusterSecret.enabled" }}{{ end -}}
{{- if and (or $v.networkPolicy.users $v.networkPolicy.egress.enabled) (not $v.networkPolicy.enabled) }}{{ fail "networkPolicy.users and networkPolicy.egress: need networkPolicy.enabled" }}{{ end -}}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.prometheusAddress) }}{{ fail "autoscaling.kind keda: needs autoscaling.prometheusAddress" }}{{ end -}}
{{- if and $v.model.volume.create $v.model.volume.existingClaim }}{{ fail "model.volume.create and model.volume.existingClaim: one or the other" }}{{ end -}}
{{- $p := $v.ports -}}
{{- include "diptych.checkPorts" (dict "of" "routers" "names" (list "http" "grpc" "registry") "ports" $p) -}}
{{- include "diptych.checkPorts" (dict "of" "workers" "names" (list "worker" "kv" "metrics") "ports" $p) -}}
{{- include "diptych.checkArgs" (dict "of" "router.extraArgs" "args" $v.router.extraArgs) -}}
{{- include "diptych.checkArgs" (dict "of" "workers.extraArgs" "args" $v.workers.extraArgs) -}}
{{- include "diptych.checkEnv" (dict "own" (list "HOME") "envs" (dict "router.env" $v.router.env)) -}}
{{- include "diptych.checkEnv" (dict "own" (list "HOME" (ternary "HF_TOKEN" "HOME" (ne $v.model.tokenSecret.name ""))) "envs" (dict "model.env" $v.model.env)) -}}
{{- include "diptych.checkResources" (dict "of" "model" "resources" $v.model.resources) -}}
{{- include "diptych.checkResources" (dict "of" "router" "resources" $v.router.resources) -}}
{{- include "diptych.checkResources" (dict "of" "redis" "resources" $v.redis.resources) -}}
{{- range list "prefill" "decode" -}}
{{- include "diptych.checkPool" (dict "of" . "pool" (index $v .)) -}}
{{- include "diptych.checkArgs" (dict "of" (printf "%s.extraArgs" .) "args" (index $v . "extraArgs")) -}}
{{- include "diptych.checkEnv" (dict "own" (list "HOME" "POD_NAME" "POD_IP") "envs" (dict (printf "%s.env" .) (index $v . "env") "workers.env" $v.workers.env)) -}}
{{- $scale := index $v.autoscaling . -}}
{{- if gt (int $scale.minReplicas) (int $scale.maxReplicas) }}{{ fail (printf "autoscaling.%s: minReplicas %v is more than maxReplicas %v" . $scale.minReplicas $scale.maxReplicas) }}{{ end -}}
{{- end -}}
{{- end }}
