{{- /*
One pool's workers: a Deployment, and a Service that resolves to all of them.

A Deployment and no StatefulSet: a worker keeps nothing that a name would lead back to. A set would not replace a pod whose node is
cut off, would roll one by one without room, and would always take the youngest away.
*/ -}}

{{- define "diptych.workerProbe" -}}
{{- if .root.Values.tls.enabled }}
exec:
  command: [diptych, health, "127.0.0.1:{{ .root.Values.ports.worker }}", --timeout=4, --tls-ca=/etc/diptych/tls/ca.crt, --tls-cert=/etc/diptych/tls/tls.crt, --tls-key=/etc/diptych/tls/tls.key, "--tls-server-name={{ .root.Values.tls.serverName }}"]
{{- else }}
grpc: {port: {{ .root.Values.ports.worker }}}
{{- end }}
timeoutSeconds: 5
{{- end }}

{{- define "diptych.workerArgs" -}}
{{- $v := .root.Values -}}
- {{ printf "--model=%s" (include "diptych.modelDir" .root) | quote }}
{{- with $v.model.servedName }}
- {{ printf "--served-name=%s" . | quote }}
{{- end }}
- --worker-id=$(POD_NAME)
- {{ printf "--host=%s" $v.listen | quote }}
- --advertise=$(POD_IP)
- "--port={{ $v.ports.worker }}"
- "--kv-port={{ $v.ports.kv }}"
- "--metrics-port={{ $v.ports.metrics }}"
- "--connector={{ $v.connector }}"
- "--threads={{ .given.threads }}"
{{- with include "diptych.kvMemory" .given }}
- "--kv-memory={{ . }}"
{{- end }}
{{- if gt (int .given.gpu.count) 0 }}
- --device=cuda
{{- end }}
- "--drain-timeout={{ .given.drainSeconds }}"
- "--log-level={{ $v.logLevel }}"
{{- include "diptych.redisArgs" .root }}
{{- if not (or $v.redis.enabled $v.redis.external.url) }}
- {{ printf "--router=%s-registry.%s.svc:%d" (include "diptych.fullname" .root) .root.Release.Namespace (int $v.ports.registry) | quote }}
{{- end }}
{{- include "diptych.trustArgs" .root }}
{{- range concat $v.workers.extraArgs .given.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "diptych.worker" -}}
{{- $root := .root }}{{ $given := .given }}{{ $v := .root.Values -}}
{{- include "diptych.check" $root -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "diptych.metadata" . | nindent 2 }}
spec:
{{- if eq $v.autoscaling.kind "none" }}
  replicas: {{ $given.replicas }}
{{- end }}
  minReadySeconds: 5
  progressDeadlineSeconds: {{ add $given.startSeconds 300 }}
  revisionHistoryLimit: 3
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml $given.rollout | nindent 6 }}
  selector:
    matchLabels: {{- include "diptych.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "diptych.selector" . | nindent 8 }}
{{- with $given.annotations }}
      annotations: {{- toYaml . | nindent 8 }}
{{- end }}
    spec:
{{- include "diptych.podHead" . | nindent 6 }}
{{- with $given.gpu.runtimeClassName }}
      runtimeClassName: {{ . | quote }}
{{- end }}
{{- include "diptych.modelContainer" . | nindent 6 }}
      containers:
        - name: worker
          image: {{ include "diptych.image" . | quote }}
          imagePullPolicy: {{ $v.image.pullPolicy }}
          command: [diptych, {{ .part }}]
          args: {{- include "diptych.workerArgs" . | nindent 12 }}
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            - {name: HOME, value: /tmp}
{{- with concat $v.workers.env $given.env }}
{{- toYaml . | nindent 12 }}
{{- end }}
          ports:
            - {name: grpc, containerPort: {{ $v.ports.worker }}}
            - {name: kv, containerPort: {{ $v.ports.kv }}}
            - {name: metrics, containerPort: {{ $v.ports.metrics }}}
          # All three ask gRPC health, which says no while the model loads, and while there is work that does not move.
          startupProbe: {{- include "diptych.workerProbe" . | nindent 12 }}
            periodSeconds: 5
            failureThreshold: {{ div (add $given.startSeconds 4) 5 }}
          readinessProbe: {{- include "diptych.workerProbe" . | nindent 12 }}
            periodSeconds: 5
            failureThreshold: 2
          # A worker that has not moved for a minute does not move any more: what it had is computed elsewhere by now.
          livenessProbe: {{- include "diptych.workerProbe" . | nindent 12 }}
            periodSeconds: 10
            failureThreshold: 6
{{- if gt (int $given.preStopSeconds) 0 }}
          lifecycle:
            preStop: {exec: {command: [sleep, {{ $given.preStopSeconds | quote }}]}}
{{- end }}
          securityContext: {{- include "diptych.containerSecurity" $root | nindent 12 }}
          resources:
            requests: {{- include "diptych.quantities" $given.resources.requests | nindent 14 }}
            limits:
{{- include "diptych.quantities" $given.resources.limits | nindent 14 }}
{{- if gt (int $given.gpu.count) 0 }}
              {{ $given.gpu.resource }}: {{ $given.gpu.count }}
{{- end }}
          volumeMounts: {{- include "diptych.mounts" $root | nindent 12 }}
      volumes: {{- include "diptych.volumes" $root | nindent 8 }}
---
apiVersion: v1
kind: Service
metadata: {{- include "diptych.metadata" . | nindent 2 }}
spec:
  # Workers say themselves where they are; this name is for those who look for all of them, such as a Prometheus without operator.
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{- include "diptych.selector" . | nindent 4 }}
  ports:
    - {name: metrics, port: {{ $v.ports.metrics }}, targetPort: metrics}
{{- end }}
